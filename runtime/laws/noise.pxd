# C types of noise.py: what Cython compiles the names in that file to.

cdef unsigned long long _WORD

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
