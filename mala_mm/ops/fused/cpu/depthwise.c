/* out = h + DWConv3x3(h) + bias with h = x or h = gelu(x), and its gradients, for one type of the
 * inputs and outputs (FLOAT32, BFLOAT16 or FLOAT16); computed in float32.
 *
 * Maps are dense (image, row, column, channel). A unit of work is a strip of TILE columns and BLOCK
 * channels of one image, walked over from the first row to the last: three rows of h lie in the
 * first-level cache, so that every element is read from memory and passed through the GELU once
 * (twice at the edges of strips). A strip's pieces of memory are too short for the processor to
 * foresee: each row is asked for while the one before is computed. Strips do not depend on the number of threads, hence neither do
 * the results. Loops over channels are turned into vector code by the compiler.
 */
#include <string.h>
#include <math.h>

#include "element.h"

enum { TILE = 30, BLOCK = 64, TAPS = 9, SUMS = TAPS + 1 };

typedef float strip[TILE + 2][BLOCK] __attribute__((aligned(64))); /* a column more on each side */
typedef float channels[BLOCK] __attribute__((aligned(64)));

#if defined __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float vector __attribute__((vector_size(4 * LANES), may_alias));
#define AT(row, j) (*(vector *)&(row)[j])

typedef struct {
    int64_t images, height, width, channels, threads;
    int gelu;
} problem;

/* What a unit works on: image, first column and channel, number of columns and channels, the latter
 * also rounded up to whole vectors. */
typedef struct {
    int64_t image, strip, column, channel;
    int columns, channels, lanes;
} unit;

static int64_t strips(const problem *p) { return (p->width + TILE - 1) / TILE; }
static int64_t blocks(const problem *p) { return (p->channels + BLOCK - 1) / BLOCK; }

static unit unit_of(const problem *p, int64_t index) {
    unit u;
    u.channel = index % blocks(p) * BLOCK;
    index /= blocks(p);
    u.column = index % strips(p) * TILE;
    u.image = index / strips(p);
    u.strip = index;
    u.columns = u.column + TILE < p->width ? TILE : p->width - u.column;
    u.channels = u.channel + BLOCK < p->channels ? BLOCK : p->channels - u.channel;
    u.lanes = (u.channels + LANES - 1) / LANES * LANES;
    return u;
}

static int64_t offset(const problem *p, const unit *u, int64_t row, int64_t column) {
    return ((u->image * p->height + row) * p->width + column) * p->channels + u->channel;
}

/* h = x Phi(x), and its derivative Phi(x) + x phi(x) where slope is given. For z = |x| the tail
 * 1 - Phi(z) is exp(-z^2 / 2) R(z): R is a polynomial in t = 1 / (1 + 0.29 z), fitted for this file
 * to a relative error of 2e-8 up to z = 7; the exponential is that of kernels.c. NaN stays NaN. */
static inline float gelu(float x, float *slope) {
    float z = x < 0 ? -x : x;
    float y = -0.5f * z * z;
    y = y < -87.3f ? -87.3f : y;
    float whole = rintf(y * 1.44269504f);
    float rest = y - whole * 0.693359375f + whole * 2.12194440e-4f;
    float e = 1.9875691500e-4f;
    e = e * rest + 1.3981999507e-3f;
    e = e * rest + 8.3334519073e-3f;
    e = e * rest + 4.1665795894e-2f;
    e = e * rest + 1.6666665459e-1f;
    e = e * rest + 5.0000001201e-1f;
    e = e * (rest * rest) + rest + 1;
    union {
        uint32_t bits;
        float value;
    } power = {(uint32_t)((int32_t)whole + 127) << 23};
    e *= power.value;
    float t = 1 / (1 + 0.29f * z), r = 0.03880692273f;
    r = r * t - 0.18987487257f;
    r = r * t + 0.29892215133f;
    r = r * t - 0.14139312506f;
    r = r * t + 0.17752707005f;
    r = r * t + 0.08107700199f;
    r = r * t + 0.11949016899f;
    r = r * t + 0.11544466019f;
    float tail = r * t * e;
    float part = x > 0 ? 1 - tail : tail;
    *slope = part + x * e * 0.39894228040f;
    return x * part;
}

/* Where row + 1 lies, to be asked for; after the last row anything that is there. */
static const element *next(const element *x, const problem *p, const unit *u, int64_t row) {
    return x + offset(p, u, row + 1 < p->height ? row + 1 : 0, u->column);
}

/* A row of the strip with the columns beside it; zeros outside of the map and of the channels. */
static void load(strip out, const element *x, const problem *p, const unit *u, int64_t row) {
    for (int i = 0; i < u->columns + 2; i++) {
        int64_t column = u->column + i - 1;
        if (row < 0 || row >= p->height || column < 0 || column >= p->width) {
            memset(out[i], 0, sizeof out[i]);
            continue;
        }
        const element *data = x + offset(p, u, row, column);
        if (u->channels == u->lanes)
#pragma omp simd
            for (int j = 0; j < u->lanes; j++) out[i][j] = widen(data[j]);
        else {
            memset(out[i], 0, sizeof out[i]);
            for (int j = 0; j < u->channels; j++) out[i][j] = widen(data[j]);
        }
    }
}

static void activate(strip h, strip slope, const unit *u) {
    for (int i = 0; i < u->columns + 2; i++)
#pragma omp simd
        for (int j = 0; j < u->lanes; j++) {
            float s;
            h[i][j] = gelu(h[i][j], &s);
            if (slope) slope[i][j] = s;
        }
}

static void store(element *x, const problem *p, const unit *u, int64_t row, strip in) {
    for (int i = 0; i < u->columns; i++) {
        element *data = x + offset(p, u, row, u->column + i);
        if (u->channels == u->lanes)
#pragma omp simd
            for (int j = 0; j < u->lanes; j++) data[j] = narrow(in[i][j]);
        else
            for (int j = 0; j < u->channels; j++) data[j] = narrow(in[i][j]);
    }
}

static void load_channels(channels out, const float *x, const unit *u) {
    memset(out, 0, sizeof(channels));
    memcpy(out, x + u->channel, u->channels * sizeof(float));
}

/* out = start + middle row + the nine taps, in the order of the rows above, here, below. */
static void convolve(strip out, strip above, strip here, strip below, const channels *weight,
                     const channels start, const unit *u, const element *ahead, int64_t step) {
    for (int j = 0; j < u->lanes; j += LANES) {
        vector w[TAPS], s = AT(start, j);
        for (int k = 0; k < TAPS; k++) w[k] = AT(weight[k], j);
        for (int i = 0; i < u->columns; i++) {
            __builtin_prefetch(ahead + i * step + j);
            vector sum = s + w[0] * AT(above[i], j);
            sum += w[1] * AT(above[i + 1], j);
            sum += w[2] * AT(above[i + 2], j);
            sum += w[3] * AT(here[i], j);
            sum += w[4] * AT(here[i + 1], j);
            sum += w[5] * AT(here[i + 2], j);
            sum += w[6] * AT(below[i], j);
            sum += w[7] * AT(below[i + 1], j);
            sum += w[8] * AT(below[i + 2], j);
            AT(out[i], j) = sum + AT(here[i + 1], j);
        }
    }
}

/* weight (TAPS, channels) and bias (channels) are float32. */
void forward(const problem *p, const element *x, const float *weight, const float *bias,
             element *out) {
    int64_t units = p->images * strips(p) * blocks(p);
#pragma omp parallel for schedule(dynamic) num_threads(p->threads)
    for (int64_t index = 0; index < units; index++) {
        unit u = unit_of(p, index);
        strip h[3], result;
        channels w[TAPS], b;
        load_channels(b, bias, &u);
        for (int k = 0; k < TAPS; k++) load_channels(w[k], weight + k * p->channels, &u);
        for (int64_t row = -1; row <= p->height; row++) {
            float(*newest)[BLOCK] = h[(row + 3) % 3];
            load(newest, x, p, &u, row);
            if (p->gelu && row >= 0 && row < p->height) activate(newest, NULL, &u);
            if (row < 1) continue;
            convolve(result, h[(row + 1) % 3], h[(row + 2) % 3], newest, w, b, &u,
                     next(x, p, &u, row), p->channels);
            store(out, p, &u, row - 1, result);
        }
    }
}

/* Adds to sums what one row of the gradient contributes to those of weight and bias. */
static void add_sums(channels *sums, strip grad, strip above, strip here, strip below,
                     const unit *u, const element *ahead, int64_t step) {
    for (int j = 0; j < u->lanes; j += LANES) {
        vector sum[SUMS] = {0};
        for (int i = 0; i < u->columns; i++) {
            __builtin_prefetch(ahead + i * step + j);
            vector g = AT(grad[i + 1], j);
            sum[0] += g * AT(above[i], j);
            sum[1] += g * AT(above[i + 1], j);
            sum[2] += g * AT(above[i + 2], j);
            sum[3] += g * AT(here[i], j);
            sum[4] += g * AT(here[i + 1], j);
            sum[5] += g * AT(here[i + 2], j);
            sum[6] += g * AT(below[i], j);
            sum[7] += g * AT(below[i + 1], j);
            sum[8] += g * AT(below[i + 2], j);
            sum[9] += g;
        }
        for (int k = 0; k < SUMS; k++) AT(sums[k], j) += sum[k];
    }
}

/* dx, and for each strip of each image the sums (strips, SUMS, channels) for weight and bias. */
void backward(const problem *p, const element *grad, const element *x, const float *weight,
              element *dx, float *sums) {
    int64_t units = p->images * strips(p) * blocks(p);
#pragma omp parallel for schedule(dynamic) num_threads(p->threads)
    for (int64_t index = 0; index < units; index++) {
        unit u = unit_of(p, index);
        strip h[3], g[3], slope[3], result;
        channels w[TAPS], total[SUMS], none = {0};
        memset(total, 0, sizeof total);
        for (int k = 0; k < TAPS; k++) /* turned around */
            load_channels(w[TAPS - 1 - k], weight + k * p->channels, &u);
        for (int64_t row = -1; row <= p->height; row++) {
            int newest = (row + 3) % 3, here = (row + 2) % 3, above = (row + 1) % 3;
            load(h[newest], x, p, &u, row);
            load(g[newest], grad, p, &u, row);
            if (p->gelu && row >= 0 && row < p->height) activate(h[newest], slope[newest], &u);
            if (row < 1) continue;
            convolve(result, g[above], g[here], g[newest], w, none, &u, next(grad, p, &u, row),
                     p->channels);
            add_sums(total, g[here], h[above], h[here], h[newest], &u, next(x, p, &u, row),
                     p->channels);
            if (p->gelu)
                for (int i = 0; i < u.columns; i++)
                    for (int j = 0; j < u.lanes; j += LANES)
                        AT(result[i], j) *= AT(slope[here][i + 1], j);
            store(dx, p, &u, row - 1, result);
        }
        for (int k = 0; k < SUMS; k++)
            memcpy(sums + (u.strip * SUMS + k) * p->channels + u.channel, total[k],
                   u.channels * sizeof(float));
    }
}
