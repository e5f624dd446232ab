/* Two laws of one place, the drafter's and the target's, each on a short support of its own.

   Supports are ascending ids; both laws are read in one pass over the two. As in loops.c all has a
   twin in Python, with the same bits. */

#include <math.h>
#include <stdint.h>

#include "arrays.h"
#include "pairs.h"
#include "sums.h"

/* A law: probabilities of ascending ids, and the place that was reached in it. */
typedef struct {
    const double *probs;
    const int64_t *ids;
    Py_ssize_t size, place;
} Support;

/* Take the views of a law's probabilities and ids; fail where they differ in length. */
static int support_of(Support *support, const Py_buffer *views)
{
    *support = (Support){views[0].buf, views[1].buf, length_of(&views[0]), 0};
    if (length_of(&views[1]) == support->size)
        return 0;
    PyErr_SetString(PyExc_ValueError, "probabilities and ids differ in length");
    return -1;
}

/* Fail where one of these arrays has no room for so many numbers. */
static int check_room(const Py_buffer *views, int count, Py_ssize_t size)
{
    while (count--)
        if (length_of(&views[count]) < size) {
            PyErr_SetString(PyExc_ValueError, "no room for the tokens of both laws");
            return -1;
        }
    return 0;
}

/* Go on to the next id of either law, with the place of each in its own (-1: it has none there).
   Returns 0 at the end. */
static int next_of_both(Support *first, Support *other, int64_t *id, Py_ssize_t places[2])
{
    int in_first = first->place < first->size, in_other = other->place < other->size;
    if (!in_first && !in_other)
        return 0;
    if (in_first && in_other) {
        int64_t here = first->ids[first->place], there = other->ids[other->place];
        in_first = here <= there;
        in_other = there <= here;
    }
    *id = in_first ? first->ids[first->place] : other->ids[other->place];
    places[0] = in_first ? first->place++ : -1;
    places[1] = in_other ? other->place++ : -1;
    return 1;
}

const char interleave_doc[] =
"interleave(row, lowest, draft_probs, draft_ids, target_probs, target_ids, probs, ids): mix two laws.\n\n"
"What the draft gives to tokens whose entry in the row is at least `lowest`, plus the target's times\n"
"the rest of the draft's mass. Returns how many tokens were written, 0 if the draft keeps no mass\n"
"and -1 if it keeps all of its tokens; then nothing is. A token that the row lacks is at -inf.";

PyObject *interleave(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[7];
    if (check_count(n_args, 8))
        return NULL;
    double lowest = PyFloat_AsDouble(args[1]);
    PyObject *const arrays[] = {args[0], args[2], args[3], args[4], args[5], args[6], args[7]};
    if (PyErr_Occurred() || open_arrays(arrays, views, "fdqdqDQ"))
        return NULL;
    Support draft, target;
    Py_ssize_t count = -1, size = length_of(&views[0]), all = 1;
    const float *row = views[0].buf;
    double *probs = views[5].buf, *kept;
    int64_t *ids = views[6].buf, id;
    if (support_of(&draft, &views[1]) || support_of(&target, &views[3]))
        goto done;
    if (check_room(&views[5], 2, draft.size + target.size))
        goto done;
    /* Behind what will be written: a token that is read stands no earlier than the one written. */
    kept = probs + target.size;
    for (Py_ssize_t i = 0; i < draft.size; i++) {
        id = draft.ids[i];
        int keeps = (id >= 0 && id < size ? (double)row[id] : -INFINITY) >= lowest;
        kept[i] = draft.probs[i] * keeps;
        all &= keeps;
    }
    double mass = all ? 0.0 : sum_of(kept, draft.size);
    count = all ? -1 : 0;
    if (mass > 0.0)
        for (Py_ssize_t places[2]; next_of_both(&draft, &target, &id, places); count++) {
            double own = places[0] < 0 ? 0.0 : kept[places[0]];
            probs[count] = places[1] < 0 ? own : own + (1.0 - mass) * target.probs[places[1]];
            ids[count] = id;
        }
done:
    close_arrays(views, 7);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(count);
}

const char join_doc[] =
"join(draft_probs, draft_ids, target_probs, target_ids, draft, target, ids): write both laws side by side.\n\n"
"That is on the ids of either, ascending; a token that a law lacks has 0. Returns how many.";

PyObject *join(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[7];
    if (check_count(n_args, 7) || open_arrays(args, views, "dqdqDDQ"))
        return NULL;
    Support draft, target;
    Py_ssize_t count = 0;
    if (support_of(&draft, &views[0]) || support_of(&target, &views[2]))
        goto done;
    if (check_room(&views[4], 3, draft.size + target.size))
        goto done;
    double *const out[] = {views[4].buf, views[5].buf};
    int64_t *ids = views[6].buf;
    for (Py_ssize_t places[2]; next_of_both(&draft, &target, &ids[count], places); count++) {
        out[0][count] = places[0] < 0 ? 0.0 : draft.probs[places[0]];
        out[1][count] = places[1] < 0 ? 0.0 : target.probs[places[1]];
    }
done:
    close_arrays(views, 7);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(count);
}

const char distance_doc[] =
"distance(probs, ids, draft_probs, draft_ids): return the sum of max(0, P - Q).";

PyObject *distance(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[4];
    if (check_count(n_args, 4) || open_arrays(args, views, "dqdq"))
        return NULL;
    Support target, draft;
    double *left = NULL, sum = 0.0;
    if (support_of(&target, &views[0]) || support_of(&draft, &views[2]))
        goto done;
    left = PyMem_Malloc(target.size ? (size_t)target.size * sizeof *left : 1);
    if (left == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t id;
    for (Py_ssize_t places[2]; next_of_both(&target, &draft, &id, places);)
        if (places[0] >= 0) {
            double over = target.probs[places[0]] - (places[1] < 0 ? 0.0 : draft.probs[places[1]]);
            left[places[0]] = over > 0.0 ? over : 0.0;
        }
    sum = sum_of(left, target.size);
done:
    PyMem_Free(left);
    close_arrays(views, 4);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(sum);
}
