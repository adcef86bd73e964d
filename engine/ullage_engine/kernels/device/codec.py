"""Float32 to the cache's codes and back, alike to the bit on every target, in the interpreter and in torch.

e4m3 and bfloat16 are made by integer operations: the interpreter's own conversions are wrong, and sm_80 has none to
e4m3. Numbers of e4m3 (OCP 8-bit floating point, "fn"): sign, 4 bits of exponent with bias 7, 3 of mantissa; no
infinities, 0x7f is NaN, 448 is 0x7e. Float32 has bias 127 and 23 bits of mantissa, so its upper 12 bits are e4m3's
code plus (127 - 7) * 8 = 960, once rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(values):
    """float32 without its sign, as int32: ordered as the magnitudes are, NaN above infinity above all numbers."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_e4m3(values, NATIVE: tl.constexpr):
    """uint8 codes of float32 values, nearest and half to even, saturated at 448; NaN gives NaN."""
    if NATIVE:  # cvt.rn.satfinite
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    magnitude = magnitude_bits(values)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    # half of the last kept bit less one, and one more where that bit is odd: carries are halves rounded to even
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = tl.minimum(rounded - 960, 0x7E)
    # below 2^-6 codes are multiples of 2^-9, the last place of 2^14: that sum rounds to them
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return (tl.where(magnitude > 0x7F800000, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(codes):
    """float16 values of uint8 codes divided by 256, exactly; NaN codes become 480 / 256 (their scale is NaN).

    The bits lie where float16 keeps sign, exponent and mantissa; the biases 7 and 15 make the difference of 2^8.
    """
    bits = codes.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def encode_int8(values):
    """int8 codes of float32 values within ±127, half to even; NaN gives 0.

    The sum with 1.5 * 2^23 has no places behind the point, and the whole number in its lower bits.
    """
    return ((values + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.int8)


@triton.jit
def encode_bf16(values):
    """int16 bits of bfloat16 of float32 values, half to even; NaN gives NaN."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(magnitude_bits(values) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def encode(values, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """What the cache type `KIND` stores for float32 values: of fp8 and int8 the codes, scaled before."""
    if KIND == "fp8":
        return encode_e4m3(values, NATIVE)
    elif KIND == "int8":
        return encode_int8(values)
    elif KIND == "bf16":
        return encode_bf16(values)
    else:
        return values
