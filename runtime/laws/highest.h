/* The highest entries of a row. */

#ifndef HIGHEST_H
#define HIGHEST_H

#include <stddef.h>
#include <stdint.h>

#define MOST_RANKED 256

typedef struct {
    ptrdiff_t count, most;
    float values[MOST_RANKED]; /* descending; of equals the lower id first */
    int64_t ids[MOST_RANKED];
    int has_nan;
} Ranking;

/* Rank the `most` highest entries of a row that has no fewer. */
void rank_row(Ranking *ranking, const float *row, ptrdiff_t size);

/* Return the place of the highest entry, the first of equals; -1 if it is not finite, or for a NaN. */
ptrdiff_t place_of_highest(const float *row, ptrdiff_t size);

#endif
