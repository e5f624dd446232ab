# C types of places.py: what Cython compiles the names in that file to.

cimport cython

cdef float _MASKED

@cython.locals(places="int[::1]", own="long long[::1]", sees="float[::1]", values="float[::1]",
    rows=Py_ssize_t, n=Py_ssize_t, width=Py_ssize_t, length=Py_ssize_t, row=Py_ssize_t,
    end=Py_ssize_t, start=Py_ssize_t, visible=Py_ssize_t)
cpdef write_chain(positions, cells, mask, into, given, Py_ssize_t position, Py_ssize_t count,
    Py_ssize_t seen, Py_ssize_t spare)

@cython.locals(places="int[::1]", held="long long[::1]", all_seen="float[::1]", names="int[::1]",
    values="float[::1]", own_seen="const unsigned char[:, ::1]", rows=Py_ssize_t, n=Py_ssize_t,
    more=Py_ssize_t, length=Py_ssize_t, row=Py_ssize_t, start=Py_ssize_t, column=Py_ssize_t)
cpdef write_places(positions, cells, mask, tokens, into, given, at, own, named, Py_ssize_t seen,
    sees, Py_ssize_t spare)

@cython.locals(at="int[::1]", held="long long[::1]", marks="long long[::1]",
    below="const int[::1]", among="const long long[::1]", n=Py_ssize_t, row=Py_ssize_t)
cpdef write_below(positions, cells, own, depths, places, Py_ssize_t root, Py_ssize_t first,
    Py_ssize_t length)

@cython.locals(flat="const float[::1]", size=Py_ssize_t)
cdef _write_rows(float[::1] into, given)
