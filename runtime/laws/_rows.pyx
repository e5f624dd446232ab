"""The loops over a row of logits in C, for rows.py, which has their docstrings."""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.math cimport isfinite
from libc.stdint cimport int64_t
from libc.string cimport strchr

cdef extern from "Python.h":
    bint PY_LITTLE_ENDIAN

cdef extern from "row.h":
    Py_ssize_t MOST_RANKED

    ctypedef struct Ranking:
        Py_ssize_t count, most
        float *values
        int64_t *ids
        bint has_nan

    ctypedef struct LogMass:
        float highest
        double mass, weighted

    void rank_row(Ranking *ranking, const float *row, Py_ssize_t size)
    Py_ssize_t place_of_highest(const float *row, Py_ssize_t size)
    LogMass log_mass_of(const float *row, Py_ssize_t size)


cdef int open_array(object numbers, Py_buffer *view, const char *kinds, bint writable) except -1:
    """Open a contiguous array of one dimension, of numbers of one of these kinds."""
    PyObject_GetBuffer(
        numbers, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
    )
    cdef const char *kind = b"B"
    if view.format != NULL:
        kind = view.format
    # numpy writes none of these; ctypes writes the machine's own order.
    if kind[0] == c"@" or kind[0] == c"=" or kind[0] == (c"<" if PY_LITTLE_ENDIAN else c">"):
        kind += 1
    cdef Py_ssize_t size = 4 if kinds[0] == c"f" else 8
    if view.ndim == 1 and kind[0] and not kind[1] and strchr(kinds, kind[0]) and view.itemsize == size:
        return 0
    found = f"an array of kind {kind.decode()!r} in {view.ndim} dimensions"
    PyBuffer_Release(view)
    raise TypeError(f"{found} where one of {chr(kinds[0])!r} is needed")


cdef Py_ssize_t length(Py_buffer *view) noexcept:
    return view.len // view.itemsize


def rank(row, ids, values, ordered, Py_ssize_t start):
    """See `rank_in_numpy`; at most MOST_RANKED entries."""
    cdef Py_buffer[4] views
    cdef int n_open = 0
    try:
        open_array(row, &views[0], b"f", False)
        n_open = 1
        open_array(ids, &views[1], b"lq", True)
        n_open = 2
        open_array(values, &views[2], b"d", True)
        n_open = 3
        open_array(ordered, &views[3], b"d", True)
        n_open = 4
        return write_ranked(views, start)
    finally:
        for i in range(n_open):
            PyBuffer_Release(&views[i])


cdef bint write_ranked(Py_buffer *views, Py_ssize_t start) except -1:
    cdef Py_ssize_t size = length(&views[0]), k = length(&views[3]), i, place
    cdef Py_ssize_t room = min(length(&views[1]), length(&views[2]))
    if not (1 <= k <= MOST_RANKED and k <= size and 0 <= start <= room - k):
        raise ValueError(f"the {k} highest of {size} entries")
    cdef Ranking ranking
    ranking.count, ranking.most, ranking.has_nan = 0, k, False
    rank_row(&ranking, <float *>views[0].buf, size)
    if ranking.has_nan or not isfinite(ranking.values[0]):
        return False
    cdef int64_t *ids = <int64_t *>views[1].buf + start
    cdef double *values = <double *>views[2].buf + start
    cdef double *ordered = <double *>views[3].buf
    for i in range(k):
        ordered[i] = <double>ranking.values[i] - <double>ranking.values[0]
        place = i
        while place > 0 and ids[place - 1] > ranking.ids[i]:
            ids[place], values[place] = ids[place - 1], values[place - 1]
            place -= 1
        ids[place], values[place] = ranking.ids[i], ordered[i]
    return True


def favourite(row):
    """See `favourite_in_numpy`."""
    cdef Py_buffer view
    open_array(row, &view, b"f", False)
    cdef Py_ssize_t place = place_of_highest(<float *>view.buf, length(&view))
    PyBuffer_Release(&view)
    return place


def log_mass(row):
    """See `log_mass_in_numpy`."""
    cdef Py_buffer view
    open_array(row, &view, b"f", False)
    cdef LogMass found = log_mass_of(<float *>view.buf, length(&view))
    PyBuffer_Release(&view)
    return found.highest, found.mass, found.weighted
