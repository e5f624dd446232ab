/* Loops over a row of logits: its highest entries, and sums of its exponentials.

   rows.py has the same in numpy, for where nothing was compiled. The highest entries are equal to the
   bit. Sums round otherwise than numpy's: they decide thresholds of rules that are not exact. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "highest.h"
#include "widths.h"

/* -- sums of exponentials --------------------------------------------------------------------------

   exp(x) for x <= 0 is 2^n times a polynomial of what is left, as in Cephes' expf: right to 2 units in
   the last place. */

#define SUM_LANES 32
#define LOWEST -87.0f /* exp of it is the least normal float: below nothing counts */

/* Return the highest entry of a row of at least one; with a NaN among them, any entry. */
FOR_EACH_WIDTH
static float highest_of(const float *row, ptrdiff_t size)
{
    float lanes[SUM_LANES], highest = row[0];
    ptrdiff_t start = 0;
    for (int j = 0; j < SUM_LANES; j++)
        lanes[j] = row[0];
    for (; start + SUM_LANES <= size; start += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++)
            lanes[j] = row[start + j] > lanes[j] ? row[start + j] : lanes[j];
    for (int j = 0; j < SUM_LANES; j++)
        highest = lanes[j] > highest ? lanes[j] : highest;
    for (; start < size; start++)
        highest = row[start] > highest ? row[start] : highest;
    return highest;
}

/* Add exp(x) and x exp(x) of the entries to the sums of their lanes; return how many filled these. */
FOR_EACH_WIDTH
static ptrdiff_t add_blocks(const float *row, ptrdiff_t size, float highest, float *masses,
                            float *weighted)
{
    float mass_here[SUM_LANES], weighted_here[SUM_LANES]; /* in registers */
    ptrdiff_t start = 0;
    for (int j = 0; j < SUM_LANES; j++) {
        mass_here[j] = masses[j];
        weighted_here[j] = weighted[j];
    }
    for (; start + SUM_LANES <= size; start += SUM_LANES) {
        float x[SUM_LANES], power[SUM_LANES];
        int32_t bits[SUM_LANES];
        for (int j = 0; j < SUM_LANES; j++) {
            float value = row[start + j] - highest;
            x[j] = value > LOWEST ? value : LOWEST;
            /* Truncation rounds towards 0, so a half less rounds a negative number to the nearest. */
            bits[j] = (int32_t)(x[j] * 1.44269504f - 0.5f);
        }
        for (int j = 0; j < SUM_LANES; j++) {
            float n = (float)bits[j];
            float r = (x[j] - n * 0.693359375f) + n * 2.12194440e-4f;
            float p = 1.9875691500e-4f;
            p = p * r + 1.3981999507e-3f;
            p = p * r + 8.3334519073e-3f;
            p = p * r + 4.1665795894e-2f;
            p = p * r + 1.6666665459e-1f;
            p = p * r + 5.0000001201e-1f;
            power[j] = p * r * r + r + 1.0f;
            bits[j] = (bits[j] + 127) << 23;
            float scale;
            memcpy(&scale, &bits[j], sizeof scale);
            float mass = power[j] * scale;
            mass_here[j] += mass;
            weighted_here[j] += x[j] * mass;
        }
    }
    for (int j = 0; j < SUM_LANES; j++) {
        masses[j] = mass_here[j];
        weighted[j] = weighted_here[j];
    }
    return start;
}

/* As add_blocks, with a polynomial of degree 3 for 2^f: half of the work. */
FOR_EACH_WIDTH
static ptrdiff_t add_rough_blocks(const float *row, ptrdiff_t size, float highest, float *masses,
                                  float *weighted)
{
    float mass_here[SUM_LANES], weighted_here[SUM_LANES]; /* in registers */
    ptrdiff_t start = 0;
    for (int j = 0; j < SUM_LANES; j++) {
        mass_here[j] = masses[j];
        weighted_here[j] = weighted[j];
    }
    for (; start + SUM_LANES <= size; start += SUM_LANES) {
        float x[SUM_LANES], power[SUM_LANES];
        int32_t bits[SUM_LANES];
        for (int j = 0; j < SUM_LANES; j++) {
            float value = row[start + j] - highest;
            x[j] = value > LOWEST ? value : LOWEST;
        }
        for (int j = 0; j < SUM_LANES; j++) {
            bits[j] = (int32_t)(x[j] * 1.44269504f);
            float f = x[j] * 1.44269504f - (float)bits[j]; /* in (-1, 0] */
            float p = 0.0390122668f * f + 0.230070384f;
            p = p * f + 0.691020728f;
            power[j] = p * f + 0.999925222f;
            bits[j] = (bits[j] + 127) << 23;
            float scale;
            memcpy(&scale, &bits[j], sizeof scale);
            float mass = power[j] * scale;
            mass_here[j] += mass;
            weighted_here[j] += x[j] * mass;
        }
    }
    for (int j = 0; j < SUM_LANES; j++) {
        masses[j] = mass_here[j];
        weighted[j] = weighted_here[j];
    }
    return start;
}

/* With x = row[i] - highest: the sum of exp(x), and that of x exp(x). */
typedef struct {
    float highest;
    double mass, weighted;
} LogMass;

typedef ptrdiff_t (*AddBlocks)(const float *, ptrdiff_t, float, float *, float *);

static LogMass sums_of(const float *row, ptrdiff_t size, float highest, AddBlocks add)
{
    LogMass found = {highest, 0.0, 0.0};
    float masses[SUM_LANES] = {0}, weighted[SUM_LANES] = {0}, rest[SUM_LANES];
    ptrdiff_t start = add(row, size, found.highest, masses, weighted);
    for (int j = 0; j < SUM_LANES; j++) {
        found.mass += masses[j];
        found.weighted += weighted[j];
        masses[j] = weighted[j] = 0.0f;
        rest[j] = start + j < size ? row[start + j] : found.highest;
    }
    if (start == size)
        return found;
    add(rest, SUM_LANES, found.highest, masses, weighted);
    for (int j = 0; start + j < size; j++) {
        found.mass += masses[j];
        found.weighted += weighted[j];
    }
    return found;
}

/* -- for Python ---------------------------------------------------------------------------------- */

#define NATIVE_ORDER (PY_LITTLE_ENDIAN ? '<' : '>') /* ctypes writes it, numpy does not */

/* Open a contiguous array of numbers of one format, or of another one of as many bytes. */
static int open_array(PyObject *object, Py_buffer *view, const char *formats, int writable)
{
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags))
        return -1;
    const char *format = view->format == NULL ? "B" : view->format;
    if (*format == '@' || *format == '=' || *format == NATIVE_ORDER)
        format++;
    if (view->ndim == 1 && *format != 0 && format[1] == 0 && strchr(formats, *format) != NULL
        && view->itemsize == (*formats == 'f' ? 4 : 8))
        return 0;
    PyErr_Format(PyExc_TypeError, "an array of kind '%s' in %d dimensions where one of '%c' is needed",
                 format, view->ndim, *formats);
    PyBuffer_Release(view);
    return -1;
}

static Py_ssize_t length_of(const Py_buffer *view)
{
    return view->len / view->itemsize;
}

PyDoc_STRVAR(rank_doc,
"rank(row, ids, values, ordered, start): find the len(ordered) highest entries, at most 256.\n\n"
"Of equals the lower ids. Writes their ids, ascending, and how far each is from the highest, both from\n"
"place `start` on, and these values in descending order. Returns False, and nothing is written, if the\n"
"highest is not finite or there is a NaN.");

static PyObject *rank_entries(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    static const char *const formats[] = {"f", "lq", "d", "d"};
    Py_buffer views[4];
    int n_open = 0, is_ranked = 0;
    if (n_args != 5)
        return PyErr_Format(PyExc_TypeError, "%zd arguments where 5 are needed", n_args);
    Py_ssize_t start = PyLong_AsSsize_t(args[4]);
    if (start == -1 && PyErr_Occurred())
        return NULL;
    while (n_open < 4 && open_array(args[n_open], &views[n_open], formats[n_open], n_open > 0) == 0)
        n_open++;
    Py_ssize_t size = n_open ? length_of(&views[0]) : 0, k = n_open == 4 ? length_of(&views[3]) : 0;
    if (n_open == 4 && k >= 1 && k <= MOST_RANKED && k <= size && start >= 0
        && start + k <= length_of(&views[1]) && start + k <= length_of(&views[2])) {
        Ranking ranking = {.count = 0, .most = k, .has_nan = 0};
        rank_row(&ranking, views[0].buf, size);
        is_ranked = !ranking.has_nan && isfinite(ranking.values[0]);
        int64_t *ids = (int64_t *)views[1].buf + start;
        double *values = (double *)views[2].buf + start, *ordered = views[3].buf;
        for (Py_ssize_t i = 0; is_ranked && i < k; i++) {
            double value = ordered[i] = (double)ranking.values[i] - (double)ranking.values[0];
            Py_ssize_t place = i;
            for (; place > 0 && ids[place - 1] > ranking.ids[i]; place--) {
                ids[place] = ids[place - 1];
                values[place] = values[place - 1];
            }
            ids[place] = ranking.ids[i];
            values[place] = value;
        }
    } else if (n_open == 4) {
        PyErr_Format(PyExc_ValueError, "the %zd highest of %zd entries", k, size);
    }
    while (n_open--)
        PyBuffer_Release(&views[n_open]);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_ranked);
}

PyDoc_STRVAR(favourite_doc,
"favourite(row): return the place of the highest entry, of equals the first; -1 as `rank` returns False.");

static PyObject *favourite(PyObject *self, PyObject *row)
{
    Py_buffer view;
    if (open_array(row, &view, "f", 0))
        return NULL;
    ptrdiff_t place = place_of_highest(view.buf, length_of(&view));
    PyBuffer_Release(&view);
    return PyLong_FromSsize_t(place);
}

static PyObject *sum_up(PyObject *row, AddBlocks add)
{
    Py_buffer view;
    if (open_array(row, &view, "f", 0))
        return NULL;
    Py_ssize_t size = length_of(&view);
    float highest = size ? highest_of(view.buf, size) : -INFINITY;
    LogMass found = sums_of(view.buf, size, highest, add);
    PyBuffer_Release(&view);
    return Py_BuildValue("(ddd)", (double)found.highest, found.mass, found.weighted);
}

PyDoc_STRVAR(log_mass_doc,
"log_mass(row): return the highest entry, and of x = entry - highest the sums of exp(x) and x exp(x).");

static PyObject *log_mass(PyObject *self, PyObject *row)
{
    return sum_up(row, add_blocks);
}

PyDoc_STRVAR(rough_mass_doc, "rough_mass(row): as log_mass, the sums within 0.01 %.");

static PyObject *rough_mass(PyObject *self, PyObject *row)
{
    return sum_up(row, add_rough_blocks);
}

static PyMethodDef methods[] = {
    {"rank", (PyCFunction)(void (*)(void))rank_entries, METH_FASTCALL, rank_doc},
    {"favourite", favourite, METH_O, favourite_doc},
    {"log_mass", log_mass, METH_O, log_mass_doc},
    {"rough_mass", rough_mass, METH_O, rough_mass_doc},
    {NULL},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", NULL, -1, methods};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModule_Create(&module);
}
