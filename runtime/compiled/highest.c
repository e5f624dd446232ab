/* The highest entries of a row of logits, found in passes that compare vectors.

   For several, the row is cut into lanes: the k-th highest lane maximum is a bound that every one of
   the k highest entries reaches, and few others. Only those are ranked, one by one. For the highest
   alone, the row is cut into stretches, of which the first that holds it is looked through. */

#include "highest.h"
#include "widths.h"

#include <math.h>

#define LANES 1024
#define FEW_LANES 256   /* serve a fourth of them */
#define STRETCH 4096    /* entries of which the highest is found at once */
#define BLOCK 64        /* entries that are compared before any of them is looked at, */
#define FEW 16          /* and those among which it then lies */
#define STEPS 12        /* halvings of the interval in which a bound is looked for */

/* Entry i of the row is in lane i % lanes; entries that fill no whole stretch are left out. */
FOR_EACH_WIDTH
static void lane_maxima(const float *row, ptrdiff_t size, float *maxima, int lanes)
{
    for (int j = 0; j < lanes; j++)
        maxima[j] = row[j];
    for (ptrdiff_t start = lanes; start + lanes <= size; start += lanes)
        for (int j = 0; j < lanes; j++)
            maxima[j] = row[start + j] > maxima[j] ? row[start + j] : maxima[j];
}

FOR_EACH_WIDTH
static int count_from(const float *values, int size, float bound)
{
    int count = 0;
    for (int j = 0; j < size; j++)
        count += values[j] >= bound;
    return count;
}

/* Return a bound that at least k lanes reach, and few more: so do the k highest entries. */
static float bound_of_lanes(const float *maxima, int lanes, ptrdiff_t k)
{
    float low = maxima[0], high = maxima[0];
    for (int j = 1; j < lanes; j++) {
        low = maxima[j] < low ? maxima[j] : low;
        high = maxima[j] > high ? maxima[j] : high;
    }
    /* NaN and infinities end the search at a bound that lets through more, never less. */
    if (count_from(maxima, lanes, low) < k)
        return -INFINITY;
    for (int step = 0; step < STEPS; step++) {
        float middle = low + (high - low) / 2;
        if (count_from(maxima, lanes, middle) >= k)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Return where the next few entries start of which any is not below the bound, or what is left.
   NaN is not below anything: it is let through and seen. */
FOR_EACH_WIDTH
static ptrdiff_t next_few(const float *row, ptrdiff_t start, ptrdiff_t size, float bound)
{
    int any = 0;
    for (; start + BLOCK <= size; start += BLOCK) {
        for (int j = 0; j < BLOCK; j++)
            any |= !(row[start + j] < bound);
        if (any)
            break;
    }
    for (; start + FEW <= size; start += FEW) {
        any = 0;
        for (int j = 0; j < FEW; j++)
            any |= !(row[start + j] < bound);
        if (any)
            break;
    }
    return start;
}

/* Entries come by ascending id, so that one which equals a ranked entry stands behind it. */
static void rank(Ranking *ranking, float value, int64_t id)
{
    if (value != value) {
        ranking->has_nan = 1;
        return;
    }
    ptrdiff_t place = ranking->count;
    if (place == ranking->most) {
        if (value <= ranking->values[place - 1])
            return;
        place--;
    } else {
        ranking->count++;
    }
    for (; place > 0 && ranking->values[place - 1] < value; place--) {
        ranking->values[place] = ranking->values[place - 1];
        ranking->ids[place] = ranking->ids[place - 1];
    }
    ranking->values[place] = value;
    ranking->ids[place] = id;
}

void rank_row(Ranking *ranking, const float *row, ptrdiff_t size)
{
    float maxima[LANES], bound = -INFINITY;
    int lanes = ranking->most > FEW_LANES / 4 ? LANES : FEW_LANES;
    if (size >= 2 * lanes) {
        lane_maxima(row, size, maxima, lanes);
        bound = bound_of_lanes(maxima, lanes, ranking->most);
    }
    for (ptrdiff_t start = 0; start < size; start += FEW) {
        start = next_few(row, start, size, bound);
        ptrdiff_t end = start + FEW < size ? start + FEW : size;
        for (ptrdiff_t id = start; id < end; id++)
            if (!(row[id] < bound))
                rank(ranking, row[id], id);
    }
}

/* Return the highest entry; NaN if there is one. */
FOR_EACH_WIDTH
static float highest_of(const float *row, ptrdiff_t size)
{
    float maxima[BLOCK], highest = -INFINITY;
    int strange[BLOCK] = {0}, any = 0;
    ptrdiff_t start = 0;
    for (int j = 0; j < BLOCK; j++)
        maxima[j] = -INFINITY;
    for (; start + BLOCK <= size; start += BLOCK)
        for (int j = 0; j < BLOCK; j++) {
            maxima[j] = row[start + j] > maxima[j] ? row[start + j] : maxima[j];
            strange[j] |= row[start + j] != row[start + j];
        }
    for (int j = 0; j < BLOCK; j++) {
        highest = maxima[j] > highest ? maxima[j] : highest;
        any |= strange[j];
    }
    for (; start < size; start++) {
        highest = row[start] > highest ? row[start] : highest;
        any |= row[start] != row[start];
    }
    return any ? NAN : highest;
}

ptrdiff_t place_of_highest(const float *row, ptrdiff_t size)
{
    float highest = -INFINITY;
    ptrdiff_t found = 0;
    for (ptrdiff_t start = 0; start < size; start += STRETCH) {
        float here = highest_of(row + start, size - start < STRETCH ? size - start : STRETCH);
        if (here != here)
            return -1;
        if (here > highest) {
            highest = here;
            found = start;
        }
    }
    if (!isfinite(highest))
        return -1;
    /* Nothing in the stretch is above it: what is not below it is equal. */
    found = next_few(row, found, size, highest);
    while (row[found] != highest)
        found++;
    return found;
}
