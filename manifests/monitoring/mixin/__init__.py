"""Alert rules, recording rules and dashboards of Ullage, defined once.

`python -m mixin --write manifests/monitoring` renders them: plain rule files for any Prometheus, the same as
PrometheusRule objects, and Grafana dashboards as JSON. A test holds definition and rendered files together.
"""
