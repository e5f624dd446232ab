# C types of truncation.py: what Cython compiles the names in that file to.
cimport cython
cimport libc.math as math

@cython.locals(ids="Py_ssize_t[::1]", values="double[::1]", ordered="double[::1]", last=double,
    value=double, n_last=Py_ssize_t, kept=Py_ssize_t, i=Py_ssize_t, count=Py_ssize_t)
cpdef law_of_row(row, Py_ssize_t k, double share, double lowest, double temperature)

@cython.locals(count=Py_ssize_t, i=Py_ssize_t, total=double, reached=double, wanted=double)
cdef Py_ssize_t _count_left(
    const double[:] ordered, Py_ssize_t size, double share, double lowest) noexcept

cdef class RowLaws:
    cdef object _logits
    cdef Py_ssize_t _k
    cdef double _share, _lowest, _temperature
