/* Loops over rows that are compiled once for each width of vectors. */

#ifndef WIDTHS_H
#define WIDTHS_H

/* GCC compiles such a loop several times, and picks when it is loaded. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_WIDTH
#endif

/* Ask for `count` numbers that a pass over a row is to reach. Processors do so by themselves, but start
   anew on every page: from main memory that is a third of a pass. It may lie behind the row's end. */
#define AHEAD 2048 /* numbers of 32 bits */
#define LINE 16    /* of these */
#if defined(__GNUC__)
#define FETCH_AHEAD(row, count) \
    for (int line_ = 0; line_ < (count); line_ += LINE) \
        __builtin_prefetch((row) + AHEAD + line_)
#else
#define FETCH_AHEAD(row, count)
#endif

#endif
