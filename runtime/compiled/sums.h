/* Sums as numpy makes them: the same order, so the same bits. */

#ifndef SUMS_H
#define SUMS_H

#include <stddef.h>

#define SUM_BLOCK 128 /* numbers that numpy adds without halving */

/* Add in the order in which numpy adds. */
static double sum_of(const double *values, ptrdiff_t size)
{
    if (size > SUM_BLOCK) {
        ptrdiff_t half = size / 2;
        half -= half % 8;
        return sum_of(values, half) + sum_of(values + half, size - half);
    }
    double parts[8] = {0.0}, total = 0.0;
    ptrdiff_t i = 0;
    if (size >= 8) {
        for (int j = 0; j < 8; j++)
            parts[j] = values[j];
        for (i = 8; i + 8 <= size; i += 8)
            for (int j = 0; j < 8; j++)
                parts[j] += values[i + j];
        total = ((parts[0] + parts[1]) + (parts[2] + parts[3]))
              + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    }
    for (; i < size; i++)
        total += values[i];
    return total;
}

#endif
