/* The passes of the linear attention operators, computed in float32, for one head width (WIDTH) and
 * one type of the inputs and outputs (FLOAT32, BFLOAT16 or FLOAT16).
 *
 * Plain C that a compiler turns into vector code by itself: every inner loop runs over the
 * compile-time constant WIDTH, the channels of a head. Compiled when first needed by compiled.py,
 * which also adds the partial sums up. The formulas are those of mala_mm/ops/fused/library.py (Problem)
 * and their derivatives; a leading d means the gradient of what follows.
 *
 * Tokens are taken in blocks that stay in the first-level cache. An image and head is cut into
 * chunks, whose length depends on the number of tokens alone: a chunk is the unit of parallel work
 * and has its own sums, so the results do not depend on the number of threads.
 */
#include "tokens.h"

#define ROWS (WIDTH + 4) /* of a state or a sum: KV, kbar, vbar, g, and the softmax's scalars */

typedef float matrix[WIDTH][WIDTH] __attribute__((aligned(64)));
typedef float state[ROWS][WIDTH];
enum { KBAR = WIDTH, VBAR, G, SOFTMAX }; /* rows of a state */
enum { LOGSUMEXP, PEAK, TOTAL };         /* columns of its row SOFTMAX */
enum { MALA, RALA, LINEAR };

/* The number of a kind, or -1 for one that is not computed here. */
int kind_of(const char *name) {
    static const char *const names[] = {[MALA] = "mala", [RALA] = "rala", [LINEAR] = "linear"};
    for (int kind = MALA; kind <= LINEAR; kind++)
        if (!strcmp(names[kind], name)) return kind;
    return -1;
}

/* phi(x) = elu(x) + 1 = exp(min(x, 0)) + max(x, 0), with the polynomial of Cephes' expf. NaN stays
 * NaN, and the smallest value is that of the smallest normal number. */
static inline float feature(float x) {
    float y = x > 0 ? 0 : x;
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
    return e * power.value + (x > 0 ? x : 0);
}

/* phi'(x) from phi(x). */
static inline float slope_of(float phi) { return phi < 1 ? phi : 1; }

static void load_features(block out, const map *x, const piece *c, int64_t token, int n) {
    load(out, x, c, token, n);
    for (int i = 0; i < n; i++)
#pragma omp simd
        for (int j = 0; j < WIDTH; j++) out[i][j] = feature(out[i][j]);
}

/* out = in m for a block, and m += x^T y for two. */
static void apply(block out, block in, const float (*m)[WIDTH], int n) {
    multiply(out, n, in[0], WIDTH, 1, m, WIDTH);
}

static void accumulate(float (*m)[WIDTH], block x, block y, int n) {
    multiply_add(m, WIDTH, x[0], 1, WIDTH, y, n);
}

static void transpose(matrix out, const float (*in)[WIDTH]) {
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < WIDTH; j++) out[j][i] = in[i][j];
}

static inline float dot(const float *x, const float *y) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < WIDTH; j++) sum += x[j] * y[j];
    return sum;
}

/* RALA's logit of a key, in double precision: the exponential of its difference to the largest makes
 * a relative error of the absolute one. */
static double logit(const problem *p, const float *phi, const float (*s)[WIDTH]) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < WIDTH; j++) sum += (double)phi[j] * s[G][j];
    return p->scale * sum;
}

/* out += sum_i w_i x_i, the block by itself first: fewer roundings at the size of the sum. */
static void add_rows(float *out, const float *w, block x, int n) {
    float sum[WIDTH] = {0};
    for (int i = 0; i < n; i++)
#pragma omp simd
        for (int j = 0; j < WIDTH; j++) sum[j] += (w ? w[i] : 1) * x[i][j];
    for (int j = 0; j < WIDTH; j++) out[j] += sum[j];
}

static void scale_rows(block x, const float *w, int n) {
    for (int i = 0; i < n; i++)
#pragma omp simd
        for (int j = 0; j < WIDTH; j++) x[i][j] *= w[i];
}

#define FOR_EACH_PIECE(p) \
    _Pragma("omp parallel for schedule(static) num_threads(p->threads)") \
    for (int64_t index = 0; index < pieces(p); index++)
#define FOR_EACH_BLOCK(c, token, n) \
    for (int64_t token = c.start, n; \
         n = c.stop - token < BLOCK ? c.stop - token : BLOCK, token < c.stop; token += BLOCK)

/* RALA: row G of the sums of each piece is the sum of phi(q_i). */
void sum_queries(const problem *p, const map *q, state *sums) {
    FOR_EACH_PIECE(p) {
        piece c = piece_of(p, index);
        block phi;
        memset(sums[index], 0, sizeof(state));
        FOR_EACH_BLOCK(c, token, n) {
            load_features(phi, q, &c, token, n);
            add_rows(sums[index][G], NULL, phi, n);
        }
    }
}

/* Sums of KV, kbar and, for MALA, vbar, all without constant factors. For RALA the weights are
 * exp(logit - PEAK) with the piece's own maximum, and TOTAL is their sum. */
void sum_keys(const problem *p, const map *k, const map *v, const state *states, state *sums) {
    FOR_EACH_PIECE(p) {
        piece c = piece_of(p, index);
        float(*sum)[WIDTH] = sums[index];
        block phi, x;
        float w[BLOCK];
        double logits[BLOCK];
        memset(sum, 0, sizeof(state));
        sum[SOFTMAX][PEAK] = -INFINITY;
        FOR_EACH_BLOCK(c, token, n) {
            load_features(phi, k, &c, token, n);
            load(x, v, &c, token, n);
            if (p->kind == RALA) {
                float peak = sum[SOFTMAX][PEAK], total = 0;
                for (int i = 0; i < n; i++) {
                    logits[i] = logit(p, phi[i], states[c.pair]);
                    peak = logits[i] > peak ? logits[i] : peak;
                }
                for (int i = 0; i < n; i++) total += w[i] = expf(logits[i] - peak);
                if (peak > sum[SOFTMAX][PEAK]) {
                    float fade = expf(sum[SOFTMAX][PEAK] - peak);
                    for (int i = 0; i <= KBAR; i++)
                        for (int j = 0; j < WIDTH; j++) sum[i][j] *= fade;
                    sum[SOFTMAX][TOTAL] *= fade;
                    sum[SOFTMAX][PEAK] = peak;
                }
                sum[SOFTMAX][TOTAL] += total;
                scale_rows(phi, w, n);
            }
            if (p->kind == MALA) add_rows(sum[VBAR], NULL, x, n);
            add_rows(sum[KBAR], NULL, phi, n);
            turn(phi, phi, p, token, n, 1);
            accumulate(sum, phi, x, n);
        }
    }
}

/* y_i becomes a_i y_i - b_i vbar. */
static void normalise(block y, const problem *p, const float *z, const float *vbar, int n) {
    for (int i = 0; i < n; i++) {
        float a = 1 / (z[i] + p->eps);
        if (p->kind == MALA)
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) y[i][j] = (1 + a) * y[i][j] - z[i] * vbar[j];
        else
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) y[i][j] /= z[i] + p->eps;
    }
}

/* The output; lepe and gate are both there or both NULL. */
void apply_queries(const problem *p, const map *q, const state *states, const map *lepe,
                   const map *gate, const map *out) {
    FOR_EACH_PIECE(p) {
        piece c = piece_of(p, index);
        const float(*s)[WIDTH] = states[c.pair];
        block phi, y, x;
        float z[BLOCK];
        FOR_EACH_BLOCK(c, token, n) {
            load_features(phi, q, &c, token, n);
            for (int i = 0; i < n; i++) z[i] = dot(phi[i], s[KBAR]);
            turn(phi, phi, p, token, n, 1);
            apply(y, phi, s, n);
            normalise(y, p, z, s[VBAR], n);
            if (gate) {
                load(x, lepe, &c, token, n);
                load(phi, gate, &c, token, n);
                for (int i = 0; i < n; i++)
#pragma omp simd
                    for (int j = 0; j < WIDTH; j++) y[i][j] = (y[i][j] + x[i][j]) * phi[i][j];
            }
            store(out, &c, token, n, y);
        }
    }
}

/* dq (for RALA without what comes through g), dlepe and dgate; the sums of dKV, dkbar and, for
 * MALA, dvbar. */
void query_gradients(const problem *p, const map *grad, const map *q, const state *states,
                     const map *lepe, const map *gate, const map *dq, const map *dlepe,
                     const map *dgate, state *sums) {
    FOR_EACH_PIECE(p) {
        piece c = piece_of(p, index);
        const float(*s)[WIDTH] = states[c.pair];
        float(*sum)[WIDTH] = sums[index];
        block phi, turned, g, x, u;
        matrix kv_transposed;
        float z[BLOCK], dz[BLOCK], a[BLOCK], minus_z[BLOCK];
        transpose(kv_transposed, s);
        memset(sum, 0, sizeof(state));
        FOR_EACH_BLOCK(c, token, n) {
            load_features(phi, q, &c, token, n);
            turn(turned, phi, p, token, n, 1);
            load(g, grad, &c, token, n);
            for (int i = 0; i < n; i++) {
                z[i] = dot(phi[i], s[KBAR]);
                minus_z[i] = -z[i];
                a[i] = 1 / (z[i] + p->eps) + (p->kind == MALA);
            }
            if (gate) {
                apply(u, turned, s, n);
                normalise(u, p, z, s[VBAR], n);
                load(x, lepe, &c, token, n);
                for (int i = 0; i < n; i++)
#pragma omp simd
                    for (int j = 0; j < WIDTH; j++) u[i][j] = (u[i][j] + x[i][j]) * g[i][j];
                store(dgate, &c, token, n, u);
                load(x, gate, &c, token, n);
                for (int i = 0; i < n; i++)
#pragma omp simd
                    for (int j = 0; j < WIDTH; j++) g[i][j] *= x[i][j];
                store(dlepe, &c, token, n, g);
            }
            if (p->kind == MALA) add_rows(sum[VBAR], minus_z, g, n);
            for (int i = 0; i < n; i++) dz[i] = p->kind == MALA ? -dot(g[i], s[VBAR]) : 0;
            scale_rows(g, a, n);
            accumulate(sum, turned, g, n);
            apply(u, g, kv_transposed, n); /* R_i^T (a_i g_i KV^T) */
            turn(u, u, p, token, n, -1);
            for (int i = 0; i < n; i++) {
                /* a'(z) / a, in a form that does not overflow where a' does */
                float slope = 1 / (z[i] + p->eps);
                if (p->kind == MALA) slope /= z[i] + (1 + p->eps);
                dz[i] -= slope * dot(u[i], phi[i]);
            }
            add_rows(sum[KBAR], dz, phi, n);
            for (int i = 0; i < n; i++)
#pragma omp simd
                for (int j = 0; j < WIDTH; j++)
                    u[i][j] = (u[i][j] + dz[i] * s[KBAR][j]) * slope_of(phi[i][j]);
            store(dq, &c, token, n, u);
        }
    }
}

/* dk and dv from the gradients of the states, constant factors included. RALA: through the softmax
 * as well, dlogit_j = w_j (dw_j - sum_m w_m dw_m), where that sum stands in row SOFTMAX of the
 * gradients; row G of the sums is that of dg. */
void key_gradients(const problem *p, const map *k, const map *v, const state *states,
                   const state *gradients, const map *dk, const map *dv, state *sums) {
    FOR_EACH_PIECE(p) {
        piece c = piece_of(p, index);
        const float(*s)[WIDTH] = states[c.pair], (*ds)[WIDTH] = gradients[c.pair];
        block phi, turned, x, u;
        matrix dkv_transposed;
        float w[BLOCK], dlogit[BLOCK];
        transpose(dkv_transposed, ds);
        if (p->kind == RALA) memset(sums[index], 0, sizeof(state));
        FOR_EACH_BLOCK(c, token, n) {
            load_features(phi, k, &c, token, n);
            turn(turned, phi, p, token, n, 1);
            load(x, v, &c, token, n);
            apply(u, x, dkv_transposed, n);
            apply(x, turned, ds, n);
            turn(u, u, p, token, n, -1); /* R_j^T (v_j dKV^T) */
            for (int i = 0; i < n; i++)
#pragma omp simd
                for (int j = 0; j < WIDTH; j++) u[i][j] += ds[KBAR][j];
            if (p->kind == RALA) {
                for (int i = 0; i < n; i++) {
                    w[i] = expf(logit(p, phi[i], s) - s[SOFTMAX][PEAK]) / s[SOFTMAX][TOTAL];
                    dlogit[i] = p->scale * w[i] * (dot(u[i], phi[i]) - ds[SOFTMAX][0]);
#pragma omp simd
                    for (int j = 0; j < WIDTH; j++) u[i][j] = w[i] * u[i][j] + dlogit[i] * s[G][j];
                }
                add_rows(sums[index][G], dlogit, phi, n);
                scale_rows(x, w, n);
            } else {
                for (int i = 0; i < n; i++)
#pragma omp simd
                    for (int j = 0; j < WIDTH; j++) x[i][j] += ds[VBAR][j];
            }
            for (int i = 0; i < n; i++)
#pragma omp simd
                for (int j = 0; j < WIDTH; j++) u[i][j] *= slope_of(phi[i][j]);
            store(dk, &c, token, n, u);
            store(dv, &c, token, n, x);
        }
    }
}

/* RALA: dq_i += phi'(q_i) dg, with row G of the gradients. */
void add_global_gradients(const problem *p, const map *q, const state *gradients, const map *dq) {
    FOR_EACH_PIECE(p) {
        piece c = piece_of(p, index);
        const float *dg = gradients[c.pair][G];
        block phi, x;
        FOR_EACH_BLOCK(c, token, n) {
            load_features(phi, q, &c, token, n);
            load(x, dq, &c, token, n);
            for (int i = 0; i < n; i++)
#pragma omp simd
                for (int j = 0; j < WIDTH; j++) x[i][j] += slope_of(phi[i][j]) * dg[j];
            store(dq, &c, token, n, x);
        }
    }
}
