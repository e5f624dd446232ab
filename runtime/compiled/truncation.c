/* What top-k, top-p and min-p leave of a row, and its probabilities by the temperature.

   Sums run in numpy's order and exponentials are numpy's, so that Python's way gives the same bits. */

#include "truncation.h"

#include <math.h>
#include <string.h>

#include "arrays.h"
#include "highest.h"
#include "sums.h"

double scale_weights(double *weights, Py_ssize_t size)
{
    double total = sum_of(weights, size);
    if (total > 0.0)
        for (Py_ssize_t i = 0; i < size; i++)
            weights[i] /= total;
    return total;
}

/* Return how many of these masses, the highest first, bring their sum to a share of all. */
static Py_ssize_t count_to_share(const double *masses, Py_ssize_t count, double share)
{
    double total = 0.0, reached = 0.0;
    for (Py_ssize_t i = 0; i < count; i++)
        total += masses[i];
    double wanted = share * total;
    for (Py_ssize_t i = 0; i < count; i++) {
        reached += masses[i];
        if (reached >= wanted)
            return i + 1;
    }
    return count;
}

static void order_by_id(int64_t *ids, double *values, Py_ssize_t count)
{
    for (Py_ssize_t i = 1; i < count; i++) {
        int64_t id = ids[i];
        double value = values[i];
        Py_ssize_t place = i;
        for (; place > 0 && ids[place - 1] > id; place--) {
            ids[place] = ids[place - 1];
            values[place] = values[place - 1];
        }
        ids[place] = id;
        values[place] = value;
    }
}

/* The beginning of numpy's PyUFuncObject, as its public headers have it. */
typedef void (*InnerLoop)(char **, const Py_ssize_t *, const Py_ssize_t *, void *);
typedef struct {
    PyObject_HEAD
    int n_in, n_out, n_args, identity;
    InnerLoop *loops;
    void *const *data;
    int n_loops, reserved;
    const char *name, *types;
} UFunc;

#define DOUBLE 12 /* numpy's number of the type */

static int says(PyObject *function, const char *name, long value)
{
    PyObject *said = PyObject_GetAttrString(function, name);
    long found = said == NULL ? -1 : PyLong_AsLong(said);
    Py_XDECREF(said);
    return found == value && !PyErr_Occurred();
}

/* Return numpy's own loop of a function over doubles; NULL where it is no such function of numpy's.

   It gives the same bits as a call, whose way to it is long: none of that is in the processor's caches
   after an evaluation. The last function that was asked for is remembered. */
static InnerLoop loop_of(PyObject *function, void **data)
{
    static PyObject *known; /* held */
    static InnerLoop loop;
    static void *its_data;
    if (function != known) {
        const UFunc *ufunc = (const UFunc *)function;
        InnerLoop found = NULL;
        if (strcmp(Py_TYPE(function)->tp_name, "numpy.ufunc") == 0 && says(function, "nin", 1)
            && says(function, "nout", 1) && says(function, "nargs", 2) && ufunc->n_in == 1
            && ufunc->n_out == 1 && ufunc->n_args == 2 && says(function, "ntypes", ufunc->n_loops))
            for (int i = 0; i < ufunc->n_loops && found == NULL; i++)
                if (ufunc->types[2 * i] == DOUBLE && ufunc->types[2 * i + 1] == DOUBLE) {
                    found = ufunc->loops[i];
                    its_data = ufunc->data == NULL ? NULL : ufunc->data[i];
                }
        PyErr_Clear();
        Py_XSETREF(known, Py_NewRef(function));
        loop = found;
    }
    *data = its_data;
    return loop;
}

/* Write numpy's exponentials of an array's numbers, which `values` are, to `out`; -1 is an error. */
static int exponentials(PyObject *exp, PyObject *array, double *values, Py_ssize_t size, double *out)
{
    void *data;
    InnerLoop loop = loop_of(exp, &data);
    if (loop != NULL) {
        char *ends[] = {(char *)values, (char *)out};
        const Py_ssize_t strides[] = {sizeof(double), sizeof(double)};
        loop(ends, &size, strides, data);
        return 0;
    }
    Py_buffer view;
    PyObject *made = PyObject_CallOneArg(exp, array);
    if (made == NULL || open_array(made, &view, 'd', 0)) {
        Py_XDECREF(made);
        return -1;
    }
    int fits = length_of(&view) >= size;
    if (fits)
        memcpy(out, view.buf, (size_t)size * sizeof *out);
    else
        PyErr_SetString(PyExc_ValueError, "fewer exponentials than numbers");
    PyBuffer_Release(&view);
    Py_DECREF(made);
    return fits ? 0 : -1;
}

/* Return how many of ranked tokens truncation leaves; -1 is an error. */
static Py_ssize_t count_left(
    PyObject *exp, PyObject *array, double *values, Py_ssize_t count, double share, double lowest)
{
    if (share < 1.0) {
        double masses[MOST_RANKED];
        if (exponentials(exp, array, values, count, masses))
            return -1;
        count = count_to_share(masses, count, share);
    }
    while (count > 1 && values[count - 1] < lowest)
        count--;
    return count;
}

Py_ssize_t law_of_row(
    const float *row, Py_ssize_t size, const Cuts *cuts, Py_ssize_t k, int64_t *ids, double *probs,
    PyObject *array)
{
    Ranking ranking = {.count = 0, .most = k, .has_nan = 0};
    rank_row(&ranking, row, size);
    if (ranking.has_nan || !isfinite(ranking.values[0]))
        return 0;
    for (Py_ssize_t i = 0; i < k; i++) {
        ids[i] = ranking.ids[i];
        probs[i] = (double)ranking.values[i] - (double)ranking.values[0];
    }
    Py_ssize_t count = count_left(cuts->exp, array, probs, k, cuts->share, cuts->lowest);
    if (count < 0)
        return -1;
    order_by_id(ids, probs, count);
    for (Py_ssize_t i = 0; i < count; i++)
        probs[i] /= cuts->temperature;
    if (exponentials(cuts->exp, array, probs, count, probs))
        return -1;
    scale_weights(probs, count);
    return count;
}
