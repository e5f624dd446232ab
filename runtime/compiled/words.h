/* The numbers that decide the token at a position: see runtime/laws/noise.py. */

#ifndef WORDS_H
#define WORDS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* BLAKE2b's digest of 8 bytes of up to 16 words of 64 bits, as hashlib makes it of "<Q...". */
uint64_t digest_of(const uint64_t *words, int count);

/* What a position's draws are made of, by an answer's key and a stream. */
static inline uint64_t word_at(uint64_t key, int64_t stream, int64_t position)
{
    const uint64_t words[] = {key, (uint64_t)stream, (uint64_t)position};
    return digest_of(words, 3);
}

#endif
