/* Loops over rows that are compiled once for each width of vectors. */

#ifndef WIDTHS_H
#define WIDTHS_H

/* GCC compiles such a loop several times, and picks when it is loaded. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_WIDTH
#endif

#endif
