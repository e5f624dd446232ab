# C types of growth.py: what Cython compiles the names in that file to.

cdef class TreeBuilder:
    cdef list _tokens, _parents
    cdef set _hidden
    cdef dict _draws, _siblings
    cdef bint _is_of_points

    cpdef add(self, parent, token, law=*)
    cpdef add_siblings(self, parent, tokens, law)
    cdef _part(self, parent)
    cdef _append(self, parent, token, bint candidate)
    cdef _require_parent(self, parent, node, bint candidate)

cpdef propose_with_replacement(TreeBuilder builder, parent, law, Py_ssize_t count, noise)
cpdef propose_without_replacement(TreeBuilder builder, parent, law, count, noise)
cpdef propose_most_likely(TreeBuilder builder, parent, law, count, noise)
cpdef most_likely(law, count)
