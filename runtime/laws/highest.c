/* The highest entries of a row of logits, found in passes that compare vectors.

   A row is read from memory once. For several entries it is cut into blocks, and these into lanes. The
   k-th highest of the maxima of some hundred groups of lanes is a bound that every one of the k highest
   entries reaches, and few others. Only lanes that reach it are looked at again, and what reaches it
   there is ranked, one by one. For the highest alone, the row is cut into stretches, of which the first
   that holds it is looked through. */

#include "row.h"

#include <math.h>

#define LANES 64          /* of a block: entry i is in lane i % LANES */
#define DEPTH 16          /* entries of a lane of a block, an even number; more in the longest rows */
#define MOST_MAXIMA 16384 /* of lanes, that are kept */
#define FEWEST_GROUPS 8   /* times the lanes, and times as many as are ranked: more hardly raise the bound */
#define MOST_GROUPS 32    /* times the lanes, enough for MOST_RANKED */
#define STRETCH 4096      /* entries of which the highest is found at once */
#define BLOCK 64          /* entries that are compared before any of them is looked at, */
#define FEW 16            /* and those among which it then lies */
#define AHEAD 2048        /* entries that are asked for before they are reached */
#define STEPS 9           /* halvings of the interval in which a bound is looked for */

/* Ask for two lines of lanes that the pass is to reach. Processors do so by themselves, but start anew on
   every page: from main memory that is a third of the pass. It may lie behind the row's end. */
#ifdef __GNUC__
#define FETCH_AHEAD(row) \
    for (int j_ = 0; j_ < 2 * LANES; j_ += 16) \
        __builtin_prefetch((row) + AHEAD + j_)
#else
#define FETCH_AHEAD(row)
#endif

/* Write the maxima of each block's lanes; return whether there is a NaN. */
FOR_EACH_WIDTH
static int lane_maxima(const float *row, ptrdiff_t blocks, ptrdiff_t depth, float *maxima)
{
    int strange[LANES] = {0}, any = 0;
    for (ptrdiff_t block = 0; block < blocks; block++, maxima += LANES) {
        float here[LANES]; /* in registers: `maxima` might be a part of the row */
        for (int j = 0; j < LANES; j++)
            here[j] = -INFINITY;
        /* In pairs: one comparison finds a NaN in either. */
        for (ptrdiff_t i = 0; i < depth; i += 2, row += 2 * LANES) {
            FETCH_AHEAD(row);
            for (int j = 0; j < LANES; j++) {
                float one = row[j], other = row[LANES + j];
                float higher = one > other ? one : other;
                here[j] = higher > here[j] ? higher : here[j];
                strange[j] |= isunordered(one, other);
            }
        }
        for (int j = 0; j < LANES; j++)
            maxima[j] = here[j];
    }
    for (int j = 0; j < LANES; j++)
        any |= strange[j];
    return any;
}

FOR_EACH_WIDTH
static int count_from(const float *values, int size, float bound)
{
    int count = 0;
    for (int j = 0; j < size; j++)
        count += values[j] >= bound;
    return count;
}

/* Find the lowest and the highest of whole blocks' maxima. */
FOR_EACH_WIDTH
static void find_extremes(const float *maxima, int count, float *lowest, float *highest)
{
    float low[LANES], high[LANES];
    for (int j = 0; j < LANES; j++)
        low[j] = high[j] = maxima[j];
    for (int start = LANES; start < count; start += LANES)
        for (int j = 0; j < LANES; j++) {
            float value = maxima[start + j];
            low[j] = value < low[j] ? value : low[j];
            high[j] = value > high[j] ? value : high[j];
        }
    *lowest = low[0];
    *highest = high[0];
    for (int j = 1; j < LANES; j++) {
        *lowest = low[j] < *lowest ? low[j] : *lowest;
        *highest = high[j] > *highest ? high[j] : *highest;
    }
}

/* Write the maxima of groups of lanes, those of every n-th block; return how many groups there are. */
FOR_EACH_WIDTH
static int group_maxima(const float *maxima, ptrdiff_t blocks, ptrdiff_t k, float *grouped)
{
    ptrdiff_t n = FEWEST_GROUPS;
    while (n < MOST_GROUPS && n * LANES < FEWEST_GROUPS * k)
        n *= 2;
    n = n < blocks ? n : blocks;
    for (ptrdiff_t i = 0; i < n * LANES; i++)
        grouped[i] = maxima[i];
    for (ptrdiff_t block = n; block < blocks; block++) {
        const float *own = maxima + LANES * block;
        float *into = grouped + LANES * (block % n);
        for (int j = 0; j < LANES; j++)
            into[j] = own[j] > into[j] ? own[j] : into[j];
    }
    return (int)(n * LANES);
}

/* Return a bound that at least k of the maxima reach, and few more: so do the k highest entries. */
static float bound_of_maxima(const float *maxima, ptrdiff_t blocks, ptrdiff_t k)
{
    float grouped[LANES * MOST_GROUPS], low, high;
    int count = group_maxima(maxima, blocks, k, grouped);
    find_extremes(grouped, count, &low, &high);
    /* Infinities end the search at a bound that lets through more, never less. */
    for (int step = 0; step < STEPS; step++) {
        float middle = low + (high - low) / 2;
        if (count_from(grouped, count, middle) >= k)
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

/* Rank those entries from `start` to `end` that are not below a bound. */
static void rank_from(
    Ranking *ranking, const float *row, ptrdiff_t start, ptrdiff_t end, float bound)
{
    for (ptrdiff_t id = start; id < end; id++)
        if (!(row[id] < bound))
            rank(ranking, row[id], id);
}

/* Rank the entries of one block that are not below a bound, by ascending id. */
static void rank_block(
    Ranking *ranking, const float *row, ptrdiff_t start, ptrdiff_t depth, const float *maxima,
    float bound)
{
    int lanes[LANES], count = 0;
    for (ptrdiff_t j = 0; (j = next_few(maxima, j, LANES, bound)) < LANES;)
        for (ptrdiff_t end = j + FEW; j < end; j++) { /* without a branch: nothing predicts it */
            lanes[count] = (int)j;
            count += maxima[j] >= bound;
        }
    for (ptrdiff_t i = 0; count && i < depth; i++, start += LANES)
        for (int place = 0; place < count; place++)
            if (row[start + lanes[place]] >= bound)
                rank(ranking, row[start + lanes[place]], start + lanes[place]);
}

void rank_row(Ranking *ranking, const float *row, ptrdiff_t size)
{
    float maxima[MOST_MAXIMA], bound;
    ptrdiff_t depth = DEPTH;
    while (size / depth > MOST_MAXIMA)
        depth *= 2;
    ptrdiff_t length = LANES * depth, blocks = size / length;
    if (LANES * blocks < ranking->most) {
        rank_from(ranking, row, 0, size, -INFINITY);
        return;
    }
    ranking->has_nan = lane_maxima(row, blocks, depth, maxima);
    if (ranking->has_nan)
        return;
    bound = bound_of_maxima(maxima, blocks, ranking->most);
    for (ptrdiff_t block = 0; block < blocks; block++)
        rank_block(ranking, row, block * length, depth, maxima + LANES * block, bound);
    rank_from(ranking, row, blocks * length, size, bound);
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
