# C types of growth.py: what Cython compiles the names in that file to.

cdef class TreeBuilder:
    cdef list _tokens, _parents
    cdef set _hidden
    cdef dict _draws, _children, _siblings

    cpdef add(self, parent, token, law=*)
    cpdef add_siblings(self, parent, tokens, law)
    cdef _part(self, parent)
    cdef _all_draws(self)
    cdef _append(self, parent, token, bint candidate)
    cdef _require_parent(self, parent, node, bint candidate)
