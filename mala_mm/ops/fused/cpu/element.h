/* The type of inputs and outputs (FLOAT32, BFLOAT16 or FLOAT16); everything between is float32. */
#include <stdint.h>

#if defined BFLOAT16
typedef uint16_t element;
static inline float widen(element x) {
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)x << 16};
    return u.value;
}
static inline element narrow(float x) {
    union {
        float value;
        uint32_t bits;
    } u = {x};
    uint32_t to_even = 0x7fff + (u.bits >> 16 & 1);
    return x == x ? (u.bits + to_even) >> 16 : 0x7fc0;
}
#else
#if defined FLOAT16
typedef _Float16 element;
#else
typedef float element;
#endif
static inline float widen(element x) { return x; }
static inline element narrow(float x) { return x; }
#endif
