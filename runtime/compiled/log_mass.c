/* Sums of exponentials of a row of logits.

   exp(x) for x <= 0 is 2^n times a polynomial of what is left, as in Cephes' expf: right to 2 units in
   the last place. numpy's own rounds otherwise: what comes out decides thresholds, never a draw. */

#include "log_mass.h"
#include "widths.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 32
#define LOWEST -87.0f /* exp of it is the least normal float: below nothing counts */

FOR_EACH_WIDTH
static float highest_of(const float *row, ptrdiff_t size)
{
    float lanes[LANES], highest = row[0];
    ptrdiff_t start = 0;
    for (int j = 0; j < LANES; j++)
        lanes[j] = row[0];
    for (; start + LANES <= size; start += LANES)
        for (int j = 0; j < LANES; j++)
            lanes[j] = row[start + j] > lanes[j] ? row[start + j] : lanes[j];
    for (int j = 0; j < LANES; j++)
        highest = lanes[j] > highest ? lanes[j] : highest;
    for (; start < size; start++)
        highest = row[start] > highest ? row[start] : highest;
    return highest;
}

/* Add exp(x) and x exp(x) of the entries to the sums of their lanes; return how many filled these. */
FOR_EACH_WIDTH
static ptrdiff_t add_blocks(const float *row, ptrdiff_t size, float highest, float *masses,
                            float *weighted)
{
    float mass_here[LANES], weighted_here[LANES]; /* in registers */
    ptrdiff_t start = 0;
    for (int j = 0; j < LANES; j++) {
        mass_here[j] = masses[j];
        weighted_here[j] = weighted[j];
    }
    for (; start + LANES <= size; start += LANES) {
        float x[LANES], power[LANES];
        int32_t bits[LANES];
        for (int j = 0; j < LANES; j++) {
            float value = row[start + j] - highest;
            x[j] = value > LOWEST ? value : LOWEST;
            /* Truncation rounds towards 0, so a half less rounds a negative number to the nearest. */
            bits[j] = (int32_t)(x[j] * 1.44269504f - 0.5f);
        }
        for (int j = 0; j < LANES; j++) {
            float n = (float)bits[j];
            float r = (x[j] - n * 0.693359375f) + n * 2.12194440e-4f;
            float p = 1.9875691500e-4f;
            p = p * r + 1.3981999507e-3f;
            p = p * r + 8.3334519073e-3f;
            p = p * r + 4.1665795894e-2f;
            p = p * r + 1.6666665459e-1f;
            p = p * r + 5.0000001201e-1f;
            power[j] = p * r * r + r + 1.0f;
            bits[j] = (bits[j] + 127) << 23;
            float scale;
            memcpy(&scale, &bits[j], sizeof scale);
            float mass = power[j] * scale;
            mass_here[j] += mass;
            weighted_here[j] += x[j] * mass;
        }
    }
    for (int j = 0; j < LANES; j++) {
        masses[j] = mass_here[j];
        weighted[j] = weighted_here[j];
    }
    return start;
}

float highest_entry(const float *row, ptrdiff_t size)
{
    return highest_of(row, size);
}

/* As add_blocks, with a polynomial of degree 3 for 2^f: half of the work. */
FOR_EACH_WIDTH
static ptrdiff_t add_rough_blocks(const float *row, ptrdiff_t size, float highest, float *masses,
                                  float *weighted)
{
    float mass_here[LANES], weighted_here[LANES]; /* in registers */
    ptrdiff_t start = 0;
    for (int j = 0; j < LANES; j++) {
        mass_here[j] = masses[j];
        weighted_here[j] = weighted[j];
    }
    for (; start + LANES <= size; start += LANES) {
        float x[LANES], power[LANES];
        int32_t bits[LANES];
        for (int j = 0; j < LANES; j++) {
            float value = row[start + j] - highest;
            x[j] = value > LOWEST ? value : LOWEST;
        }
        for (int j = 0; j < LANES; j++) {
            bits[j] = (int32_t)(x[j] * 1.44269504f);
            float f = x[j] * 1.44269504f - (float)bits[j]; /* in (-1, 0] */
            float p = 0.0390122668f * f + 0.230070384f;
            p = p * f + 0.691020728f;
            power[j] = p * f + 0.999925222f;
            bits[j] = (bits[j] + 127) << 23;
            float scale;
            memcpy(&scale, &bits[j], sizeof scale);
            float mass = power[j] * scale;
            mass_here[j] += mass;
            weighted_here[j] += x[j] * mass;
        }
    }
    for (int j = 0; j < LANES; j++) {
        masses[j] = mass_here[j];
        weighted[j] = weighted_here[j];
    }
    return start;
}

typedef ptrdiff_t (*AddBlocks)(const float *, ptrdiff_t, float, float *, float *);

static LogMass sums_of(const float *row, ptrdiff_t size, float highest, AddBlocks add)
{
    LogMass found = {highest, 0.0, 0.0};
    float masses[LANES] = {0}, weighted[LANES] = {0}, rest[LANES];
    ptrdiff_t start = add(row, size, found.highest, masses, weighted);
    for (int j = 0; j < LANES; j++) {
        found.mass += masses[j];
        found.weighted += weighted[j];
        masses[j] = weighted[j] = 0.0f;
        rest[j] = start + j < size ? row[start + j] : found.highest;
    }
    if (start == size)
        return found;
    add(rest, LANES, found.highest, masses, weighted);
    for (int j = 0; start + j < size; j++) {
        found.mass += masses[j];
        found.weighted += weighted[j];
    }
    return found;
}

LogMass log_mass_of(const float *row, ptrdiff_t size, float highest)
{
    return sums_of(row, size, highest, add_blocks);
}

LogMass rough_mass_of(const float *row, ptrdiff_t size)
{
    return sums_of(row, size, size ? highest_of(row, size) : -INFINITY, add_rough_blocks);
}
