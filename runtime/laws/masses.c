/* Sums of exponentials over a row of logits.

   exp(x) for x <= 0 is 2^n times a polynomial of the rest, as in Cephes' expf: right to 2 units in
   the last place. rows.py has the same in numpy, for where nothing was compiled. Sums round otherwise
   there: they decide thresholds of rules that are not exact. */

#include "row.h"

#include <math.h>
#include <string.h>

#define SUM_LANES 32
#define LOWEST -87.0f /* exp of it is the least normal float: below nothing counts */

/* Return the highest entry of a row of at least one; with a NaN among them, any entry. */
FOR_EACH_WIDTH
static float highest_of(const float *row, ptrdiff_t size)
{
    float lanes[SUM_LANES], highest = row[0];
    ptrdiff_t start = 0;
    for (int j = 0; j < SUM_LANES; j++)
        lanes[j] = row[0];
    for (; start + SUM_LANES <= size; start += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++)
            lanes[j] = row[start + j] > lanes[j] ? row[start + j] : lanes[j];
    for (int j = 0; j < SUM_LANES; j++)
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
    float mass_here[SUM_LANES], weighted_here[SUM_LANES]; /* in registers */
    ptrdiff_t start = 0;
    for (int j = 0; j < SUM_LANES; j++) {
        mass_here[j] = masses[j];
        weighted_here[j] = weighted[j];
    }
    for (; start + SUM_LANES <= size; start += SUM_LANES) {
        float x[SUM_LANES], power[SUM_LANES];
        int32_t bits[SUM_LANES];
        for (int j = 0; j < SUM_LANES; j++) {
            float value = row[start + j] - highest;
            x[j] = value > LOWEST ? value : LOWEST;
            /* Truncation rounds towards 0, so a half less rounds a negative number to the nearest. */
            bits[j] = (int32_t)(x[j] * 1.44269504f - 0.5f);
        }
        for (int j = 0; j < SUM_LANES; j++) {
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
    for (int j = 0; j < SUM_LANES; j++) {
        masses[j] = mass_here[j];
        weighted[j] = weighted_here[j];
    }
    return start;
}

LogMass log_mass_of(const float *row, ptrdiff_t size)
{
    LogMass found = {size ? highest_of(row, size) : -INFINITY, 0.0, 0.0};
    float masses[SUM_LANES] = {0}, weighted[SUM_LANES] = {0}, rest[SUM_LANES];
    ptrdiff_t start = add_blocks(row, size, found.highest, masses, weighted);
    for (int j = 0; j < SUM_LANES; j++) {
        found.mass += masses[j];
        found.weighted += weighted[j];
        masses[j] = weighted[j] = 0.0f;
        rest[j] = start + j < size ? row[start + j] : found.highest;
    }
    if (start == size)
        return found;
    add_blocks(rest, SUM_LANES, found.highest, masses, weighted);
    for (int j = 0; start + j < size; j++) {
        found.mass += masses[j];
        found.weighted += weighted[j];
    }
    return found;
}
