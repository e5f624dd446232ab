# C types of noise.py: what Cython compiles the names in that file to.

cimport cython

cdef unsigned long long _WORD
cdef bytes _ORDER

cdef class SeededNoise:
    cdef unsigned long long _key, _word
    cdef long long _stream
    cdef readonly Py_ssize_t _position
    cdef Py_ssize_t _accepts, _choices
    cdef bint _has_word

    cpdef seek(self, Py_ssize_t position)
    cpdef bint accept(self, double probability) except -1
    cpdef choose(self, law)
    cdef long long _stream_number(self) except? -1
    cpdef unsigned long long _hash(self, unsigned long long index) except? 0
    cdef unsigned long long _position_word(self) except? 0

cdef class DraftNoise(SeededNoise):
    cdef Py_ssize_t _round_start
    cdef bint _has_stream

    cpdef choose(self, law)
    cpdef choose_distinct(self, law, Py_ssize_t count)

@cython.locals(number="unsigned long long")
cpdef unsigned long long digest(
    int count, unsigned long long first, unsigned long long second, unsigned long long third
) except? 0

@cython.locals(m="unsigned long long[16]", v="unsigned long long[16]", start="unsigned long long",
    i=int, turn=int, at=Py_ssize_t, shift=int, a=int, b=int, c=int, d=int)
cpdef unsigned long long blake2b(
    int count, unsigned long long first, unsigned long long second, unsigned long long third
) except? 0

cdef unsigned long long _start(int place) except? 0
cdef void _mix(unsigned long long *v, int a, int b, int c, int d, unsigned long long x,
    unsigned long long y) noexcept
cdef unsigned long long _turned(unsigned long long word, int bits) noexcept
