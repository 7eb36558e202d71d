// What a number is: float, or with -DBF16 bfloat16, the upper half of a float's bits. And exp.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef BF16
typedef uint16_t number;

static inline float widen(number x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline number narrow(float value) {  // to the nearest; of two, to the even one
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return value != value ? 0x7fc0 : (number)rounded;  // rounding could turn a NaN into a number
}
#else
typedef float number;
static inline float widen(number x) { return x; }
static inline number narrow(float value) { return value; }
#endif

// exp to one part in ten million, in a form that compilers vectorise: 2^n e^r, |r| <= ln 2 / 2.
// The polynomial is that of the Cephes library.
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;  // written so that a NaN passes both bounds
    x = x > 88.0f ? 88.0f : x;
    const float n = rintf(x * 1.44269504f);
    // r = x - n ln 2, with ln 2 in two parts: n times the first one is exact.
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;  // 2^n
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}
