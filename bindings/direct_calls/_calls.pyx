"""llama.cpp's small functions, called by address; see the package.

ctypes converts every argument by its type and calls through libffi. Right after an evaluation none
of that is in the processor's caches, and the call takes longer than the function.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int8_t, int32_t, uintptr_t

cdef extern from "<stdbool.h>":
    ctypedef bint boolean "bool"

cdef extern from *:
    """
    #include <time.h>

    static double now(void)
    {
        struct timespec time;
    #ifdef CLOCK_MONOTONIC
        clock_gettime(CLOCK_MONOTONIC, &time);
    #else
        timespec_get(&time, TIME_UTC);
    #endif
        return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
    }
    """
    double now() nogil

# llama.cpp's llama_batch. Its size is compared with the library's before any of this is used.
ctypedef struct Batch:
    int32_t n_tokens
    int32_t *token
    float *embd
    int32_t *pos
    int32_t *n_seq_id
    int32_t **seq_id
    int8_t *logits

ctypedef void *(*AddressOf)(void *) noexcept nogil
ctypedef boolean (*Remove)(void *, int32_t, int32_t, int32_t) noexcept nogil
ctypedef void (*Share)(void *, int32_t, int32_t, int32_t, int32_t) noexcept nogil
ctypedef int32_t (*Write)(void *, int32_t, char *, int32_t, int32_t, boolean) noexcept nogil
ctypedef int32_t (*Decode)(void *, Batch) noexcept nogil
ctypedef void (*Synchronize)(void *) noexcept nogil

BATCH_BYTES = sizeof(Batch)
cdef enum:
    PIECE_SIZE = 64  # longer ones are rare


cdef int require(uintptr_t function, uintptr_t subject) except -1:
    if not function or not subject:
        raise ValueError("an address is null")
    return 0


def address(uintptr_t function, uintptr_t subject):
    """Return the address that a function gives for a context, 0 for none."""
    require(function, subject)
    cdef void *found
    with nogil:
        found = (<AddressOf>function)(<void *>subject)
    return <uintptr_t>found


def remove(uintptr_t function, uintptr_t memory, int32_t sequence, int32_t start, int32_t end):
    """Call llama_memory_seq_rm."""
    require(function, memory)
    cdef boolean done
    with nogil:
        done = (<Remove>function)(<void *>memory, sequence, start, end)
    return done


def share(
    uintptr_t function, uintptr_t memory, int32_t source, int32_t target, int32_t start, int32_t end
):
    """Call llama_memory_seq_cp."""
    require(function, memory)
    with nogil:
        (<Share>function)(<void *>memory, source, target, start, end)


def piece(uintptr_t function, uintptr_t vocabulary, int32_t token, bint special):
    """Return the bytes that llama_token_to_piece writes."""
    require(function, vocabulary)
    cdef Write write = <Write>function
    cdef char own[PIECE_SIZE]
    cdef int32_t size = write(<void *>vocabulary, token, own, PIECE_SIZE, 0, special)
    if size >= 0:
        return own[:size]
    # It returns how many bytes it needs, as a negative number.
    longer = PyBytes_FromStringAndSize(NULL, -size)
    if write(<void *>vocabulary, token, PyBytes_AS_STRING(longer), -size, 0, special) < 0:
        raise SystemError(f"llama.cpp has no text of token {token}")
    return longer


def step(
    uintptr_t decode, uintptr_t logits, uintptr_t synchronize, uintptr_t batch, uintptr_t context,
    int32_t token, int32_t position,
):
    """Evaluate a batch of one token.

    Returns the code of llama_decode, the seconds in it and in llama_synchronize (0: not called),
    and the address of the logits.
    """
    require(decode, logits)
    require(batch, context)
    cdef Batch *one = <Batch *>batch
    cdef int32_t code
    cdef double started, seconds
    cdef void *found
    one.token[0] = token
    one.pos[0] = position
    with nogil:
        started = now()
        code = (<Decode>decode)(<void *>context, one[0])
        if synchronize:
            (<Synchronize>synchronize)(<void *>context)
        seconds = now() - started
        found = (<AddressOf>logits)(<void *>context)
    return code, seconds, <uintptr_t>found
