# C types of law.py: what Cython compiles the names in that file to.
cimport cython
cimport libc.math as math

cdef unsigned long long _GOLDEN, _MIX_1, _MIX_2, _WORD
cdef double _UNIT

@cython.locals(word="unsigned long long")
cpdef unsigned long long split_mix(unsigned long long key, unsigned long long counter) noexcept
cpdef double uniform_of(unsigned long long word) noexcept

cdef class Law:
    cdef object _held_probs, _held_ids
    cdef const double[::1] _probs
    cdef const Py_ssize_t[::1] _ids
    cdef bint _is_dense
    cdef Py_ssize_t _size

    cpdef _hold(self, probs, ids)
    cpdef _fill(self)
    cpdef double probability(self, Py_ssize_t token) except? -1.0

    @cython.locals(low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t, ids="const Py_ssize_t[::1]")
    cdef Py_ssize_t _place_of(self, Py_ssize_t token) except -2

    cdef Py_ssize_t _token_in(self, Py_ssize_t place) noexcept
    cpdef token_at(self, double uniform)

    @cython.locals(probs="const double[::1]", is_dense=bint, best=Py_ssize_t,
        best_time=double, place=Py_ssize_t, rate=double, token=Py_ssize_t,
        uniform=double, time=double)
    cpdef first_to_arrive(self, unsigned long long key)

    @cython.locals(left="double[::1]", number="unsigned long long", uniform=double, place=Py_ssize_t)
    cpdef list draw_distinct(self, Py_ssize_t count, unsigned long long word, unsigned long long first)

    cpdef Law residual(self, Law draft)
    @cython.locals(law=Law)
    cdef Law _with(self, probs)

    @cython.locals(out="double[::1]", probs="const double[::1]", ids="const Py_ssize_t[::1]",
        others="const double[::1]", other_ids="const Py_ssize_t[::1]", place=Py_ssize_t,
        n_drafted=Py_ssize_t, i=Py_ssize_t, token=Py_ssize_t, drafted=double, over=double)
    cpdef left_over(self, Law draft, double share=*)

    @cython.locals(place=Py_ssize_t)
    cpdef Law without(self, Py_ssize_t token)

@cython.locals(total=double, reached=double, last=Py_ssize_t, i=Py_ssize_t, wanted=double)
cdef Py_ssize_t _place_at(const double[:] probs, Py_ssize_t size, double uniform) noexcept

@cython.locals(out="double[::1]", i=Py_ssize_t)
cdef _copied(const double[::1] numbers, Py_ssize_t size)

@cython.locals(law=Law)
cdef Law _law_over(const double[::1] probs, const Py_ssize_t[::1] ids, Py_ssize_t size)

@cython.locals(a=double, b=double, c=double, d=double, e=double, f=double, g=double, h=double,
    total=double, i=Py_ssize_t, end=Py_ssize_t)
cdef double _scale(double[:] values, Py_ssize_t start, Py_ssize_t size) noexcept

cpdef double scale_to_one(weights) except? -1.0

@cython.locals(room=Py_ssize_t, n=Py_ssize_t, i=Py_ssize_t, j=Py_ssize_t, in_mine=bint,
    in_theirs=bint, mine="double[::1]", theirs="double[::1]", joint="Py_ssize_t[::1]",
    ids="const Py_ssize_t[::1]", others="const Py_ssize_t[::1]", probs="const double[::1]",
    other_probs="const double[::1]")
cdef _merged(Law law, Law other)

cdef class Truncation:
    cdef object _id_array, _value_array, _ordered_array
    cdef Py_ssize_t[::1] _ids
    cdef double[::1] _values, _ordered
    cdef Py_ssize_t _k, _room, _used, _width
    cdef double _share, _lowest, _temperature

    @cython.locals(k=Py_ssize_t, start=Py_ssize_t, end=Py_ssize_t)
    cpdef law(self, row, names=*)

    cdef _make_room(self, Py_ssize_t k)

    @cython.locals(ids="Py_ssize_t[::1]", values="double[::1]", ordered="double[::1]", last=double,
        value=double, n_last=Py_ssize_t, kept=Py_ssize_t, i=Py_ssize_t, count=Py_ssize_t)
    cdef Py_ssize_t _cut(self, Py_ssize_t start, const int[:] names) except -1

@cython.locals(count=Py_ssize_t, i=Py_ssize_t, total=double, reached=double, wanted=double)
cdef Py_ssize_t _count_left(
    const double[:] ordered, Py_ssize_t size, double share, double lowest) noexcept

cdef class _Point(Law):
    cdef Py_ssize_t _token

    cpdef _fill(self)
    cpdef double probability(self, Py_ssize_t token) except? -1.0
    cpdef token_at(self, double uniform)

cdef class RowLaws:
    cdef public object logits
    cdef Truncation _truncation

    cpdef Law law(self, row, names=*)
