// What a number is: float, or with -DBF16 bfloat16, the upper half of a float's bits.

#pragma once

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
