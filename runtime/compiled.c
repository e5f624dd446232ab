/* Inner loops of laws: the highest of a row, what truncation leaves of them, draws from short laws.

   Everything here has a twin in Python, which serves where there was no compiler, and both give
   the same bits: sums run in the same order, exponentials stay with numpy, and nothing here may be
   contracted or reordered by the compiler (no -ffast-math). All arrays are one-dimensional and
   contiguous. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

/* GCC compiles a loop over a row once for each width of vectors, and picks when it is loaded. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_WIDTH
#endif

#define NATIVE_ORDER (PY_LITTLE_ENDIAN ? '<' : '>') /* ctypes says it, numpy does not */
#define MOST_RANKED 256 /* the most entries that are ranked; more lanes than that bound them */
#define LANES 1024
#define FEW_LANES 256   /* serve a fourth of them */
#define BLOCK 64        /* entries that are compared before any of them is looked at, */
#define FEW 16          /* and those among which it then lies */
#define SUM_BLOCK 128   /* numbers that numpy adds without halving */
#define STEPS 12        /* halvings of the interval in which a bound is looked for */

/* -- arrays ------------------------------------------------------------------------------------ */

/* Open a contiguous array of numbers of one kind: 'f', 'd', or 'q' for signed integers of 64 bits. */
static int open_array(PyObject *object, Py_buffer *view, char kind, int writable)
{
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags))
        return -1;
    const char *order = view->format ? view->format : "B";
    char format = order[*order == '@' || *order == '=' || *order == NATIVE_ORDER];
    if (format == 'l' && view->itemsize == 8)
        format = 'q';
    if (format == kind && view->ndim == 1)
        return 0;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_TypeError, "an array of kind '%c' where one of '%c' is needed", format, kind);
    return -1;
}

/* Open arrays of these kinds, an upper-case letter for those that are written to: all or none. */
static int open_arrays(PyObject *const *objects, Py_buffer *views, const char *kinds)
{
    for (int i = 0; kinds[i]; i++) {
        int writable = kinds[i] < 'a';
        if (open_array(objects[i], &views[i], writable ? kinds[i] + 32 : kinds[i], writable)) {
            while (i--)
                PyBuffer_Release(&views[i]);
            return -1;
        }
    }
    return 0;
}

static void close_arrays(Py_buffer *views, int count)
{
    while (count--)
        PyBuffer_Release(&views[count]);
}

static Py_ssize_t length_of(const Py_buffer *view)
{
    return view->len / view->itemsize;
}

static int check_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments where %zd are needed", given, wanted);
    return -1;
}

/* -- the highest of a row ---------------------------------------------------------------------- */

/* Entry i of the row is in lane i % lanes; entries that fill no whole stretch are left out. */
FOR_EACH_WIDTH
static void lane_maxima(const float *row, Py_ssize_t size, float *maxima, int lanes)
{
    for (int j = 0; j < lanes; j++)
        maxima[j] = row[j];
    for (Py_ssize_t start = lanes; start + lanes <= size; start += lanes)
        for (int j = 0; j < lanes; j++)
            maxima[j] = row[start + j] > maxima[j] ? row[start + j] : maxima[j];
}

FOR_EACH_WIDTH
static int count_from(const float *values, int size, float bound)
{
    int count = 0;
    for (int j = 0; j < size; j++)
        count += values[j] >= bound;
    return count;
}

/* Return a bound that at least k lanes reach, and few more: so do the k highest entries. */
static float bound_of_lanes(const float *maxima, int lanes, Py_ssize_t k)
{
    float low = maxima[0], high = maxima[0];
    for (int j = 1; j < lanes; j++) {
        low = maxima[j] < low ? maxima[j] : low;
        high = maxima[j] > high ? maxima[j] : high;
    }
    /* NaN and infinities end the search at a bound that lets through more, never less. */
    if (count_from(maxima, lanes, low) < k)
        return -INFINITY;
    for (int step = 0; step < STEPS; step++) {
        float middle = low + (high - low) / 2;
        if (count_from(maxima, lanes, middle) >= k)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Return where the next few entries start of which any is not below the bound, or what is left.
   NaN is not below anything: it is let through and seen. */
FOR_EACH_WIDTH
static Py_ssize_t next_few(const float *row, Py_ssize_t start, Py_ssize_t size, float bound)
{
    int any = 0;
    for (; start + BLOCK <= size; start += BLOCK) {
        for (int j = 0; j < BLOCK; j++)
            any |= !(row[start + j] < bound);
        if (any)
            break;
    }
    for (; start + FEW <= size; start += FEW) {
        any = 0;
        for (int j = 0; j < FEW; j++)
            any |= !(row[start + j] < bound);
        if (any)
            break;
    }
    return start;
}

typedef struct {
    Py_ssize_t count, most;
    float values[MOST_RANKED]; /* descending; of equals the lower id first */
    int64_t ids[MOST_RANKED];
    int has_nan;
} Ranking;

/* Entries come by ascending id, so that one which equals a ranked entry stands behind it. */
static void rank(Ranking *ranking, float value, int64_t id)
{
    if (value != value) {
        ranking->has_nan = 1;
        return;
    }
    Py_ssize_t place = ranking->count;
    if (place == ranking->most) {
        if (value <= ranking->values[place - 1])
            return;
        place--;
    } else {
        ranking->count++;
    }
    for (; place > 0 && ranking->values[place - 1] < value; place--) {
        ranking->values[place] = ranking->values[place - 1];
        ranking->ids[place] = ranking->ids[place - 1];
    }
    ranking->values[place] = value;
    ranking->ids[place] = id;
}

static void rank_row(Ranking *ranking, const float *row, Py_ssize_t size)
{
    float maxima[LANES], bound = -INFINITY;
    int lanes = ranking->most > FEW_LANES / 4 ? LANES : FEW_LANES;
    if (size >= 2 * lanes) {
        lane_maxima(row, size, maxima, lanes);
        bound = bound_of_lanes(maxima, lanes, ranking->most);
    }
    for (Py_ssize_t start = 0; start < size; start += FEW) {
        start = next_few(row, start, size, bound);
        Py_ssize_t end = start + FEW < size ? start + FEW : size;
        for (Py_ssize_t id = start; id < end; id++)
            if (!(row[id] < bound))
                rank(ranking, row[id], id);
    }
}

PyDoc_STRVAR(top_k_doc,
"top_k(row, ids, values): find the len(ids) highest of a row, at most 256 and no more than it has.\n\n"
"Writes their ids, the highest first and of equals the lower id, and their values less the highest.\n"
"Returns the highest, NaN if there is any.");

static PyObject *top_k(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[3];
    if (check_count(n_args, 3) || open_arrays(args, views, "fQD"))
        return NULL;
    Py_ssize_t size = length_of(&views[0]), k = length_of(&views[1]);
    if (k < 1 || k > MOST_RANKED || k > size || k != length_of(&views[2])) {
        close_arrays(views, 3);
        PyErr_Format(PyExc_ValueError, "the %zd highest of %zd entries", k, size);
        return NULL;
    }
    Ranking ranking = {.count = 0, .most = k, .has_nan = 0};
    rank_row(&ranking, views[0].buf, size);
    double highest = ranking.has_nan ? NAN : ranking.values[0];
    int64_t *ids = views[1].buf;
    double *values = views[2].buf;
    /* Fewer than k are ranked only where there is a NaN. */
    for (Py_ssize_t i = 0; i < ranking.count; i++) {
        ids[i] = ranking.ids[i];
        values[i] = (double)ranking.values[i] - highest;
    }
    close_arrays(views, 3);
    return PyFloat_FromDouble(highest);
}

/* -- truncation -------------------------------------------------------------------------------- */

PyDoc_STRVAR(cut_doc,
"cut(ids, values, masses, share, lowest, temperature): what truncation leaves of ranked tokens.\n\n"
"The first stay, up to the one that brings their masses to `share` of all (1: all), and of these\n"
"those with a value of at least `lowest`. They are ordered by id, and their values divided by\n"
"`temperature`. Returns how many.");

static PyObject *cut(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[3];
    if (check_count(n_args, 6))
        return NULL;
    double share = PyFloat_AsDouble(args[3]), lowest = PyFloat_AsDouble(args[4]);
    double temperature = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred() || open_arrays(args, views, "QDd"))
        return NULL;
    Py_ssize_t count = length_of(&views[0]);
    if (count < 1 || length_of(&views[1]) != count || length_of(&views[2]) != count) {
        close_arrays(views, 3);
        PyErr_SetString(PyExc_ValueError, "ids, values and masses differ in length");
        return NULL;
    }
    int64_t *ids = views[0].buf;
    double *values = views[1].buf;
    const double *masses = views[2].buf;
    if (share < 1.0) {
        double total = 0.0, reached = 0.0;
        for (Py_ssize_t i = 0; i < count; i++)
            total += masses[i];
        double wanted = share * total;
        for (Py_ssize_t i = 0; i < count; i++) {
            reached += masses[i];
            if (reached >= wanted)
                count = i + 1;
        }
    }
    while (count > 1 && values[count - 1] < lowest)
        count--;
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
    for (Py_ssize_t i = 0; i < count; i++)
        values[i] /= temperature;
    close_arrays(views, 3);
    return PyLong_FromSsize_t(count);
}

/* Add in the order in which numpy adds. */
static double sum_of(const double *values, Py_ssize_t size)
{
    if (size > SUM_BLOCK) {
        Py_ssize_t half = size / 2;
        half -= half % 8;
        return sum_of(values, half) + sum_of(values + half, size - half);
    }
    double parts[8] = {0.0}, total = 0.0;
    Py_ssize_t i = 0;
    if (size >= 8) {
        for (int j = 0; j < 8; j++)
            parts[j] = values[j];
        for (i = 8; i + 8 <= size; i += 8)
            for (int j = 0; j < 8; j++)
                parts[j] += values[i + j];
        total = ((parts[0] + parts[1]) + (parts[2] + parts[3]))
              + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    }
    for (; i < size; i++)
        total += values[i];
    return total;
}

PyDoc_STRVAR(scale_to_one_doc,
"scale_to_one(weights): divide by the sum, unless that is not positive; return the sum.");

static PyObject *scale_to_one(PyObject *self, PyObject *weights)
{
    Py_buffer view;
    if (open_array(weights, &view, 'd', 1))
        return NULL;
    double *values = view.buf;
    Py_ssize_t size = length_of(&view);
    double total = sum_of(values, size);
    if (total > 0.0)
        for (Py_ssize_t i = 0; i < size; i++)
            values[i] /= total;
    PyBuffer_Release(&view);
    return PyFloat_FromDouble(total);
}

/* -- draws and residuals ------------------------------------------------------------------------ */

PyDoc_STRVAR(place_at_doc,
"place_at(probs, uniform): return the place at `uniform` of the cumulative law, none of zero mass.");

static PyObject *place_at(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[1];
    if (check_count(n_args, 2))
        return NULL;
    double uniform = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred() || open_arrays(args, views, "d"))
        return NULL;
    const double *probs = views[0].buf;
    Py_ssize_t size = length_of(&views[0]), place = 0, last = -1;
    double total = 0.0, reached = 0.0;
    for (Py_ssize_t i = 0; i < size; i++) {
        total += probs[i];
        if (probs[i] != 0.0)
            last = i;
    }
    double wanted = uniform * total;
    for (; place < size; place++) {
        reached += probs[place];
        if (reached > wanted)
            break;
    }
    close_arrays(views, 1);
    return PyLong_FromSsize_t(place < size ? place : last);
}

/* The output of SplitMix64 (Steele, Lea and Flood 2014) after `counter` steps from `key`. */
static uint64_t split_mix(uint64_t key, uint64_t counter)
{
    uint64_t word = key + counter * 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

PyDoc_STRVAR(race_doc,
"race(probs, ids, key): return the place of the token that arrives first, by the numbers of a key.\n\n"
"With `ids` None, tokens are numbered by their places.");

static PyObject *race(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[2];
    if (check_count(n_args, 3))
        return NULL;
    uint64_t key = PyLong_AsUnsignedLongLong(args[2]);
    int is_dense = args[1] == Py_None;
    if (PyErr_Occurred() || open_arrays(args, views, is_dense ? "d" : "dq"))
        return NULL;
    const double *probs = views[0].buf;
    const int64_t *ids = is_dense ? NULL : views[1].buf;
    Py_ssize_t size = length_of(&views[0]), best = 0;
    double best_time = INFINITY;
    if (!is_dense && length_of(&views[1]) < size)
        size = length_of(&views[1]);
    for (Py_ssize_t i = 0; i < size; i++) {
        /* A token without mass never arrives. */
        if (!(probs[i] > 0.0))
            continue;
        uint64_t word = split_mix(key, (uint64_t)(is_dense ? i : ids[i]) + 1);
        double time = -log1p(-((double)(word >> 11) * 0x1p-53)) / probs[i];
        if (time < best_time) {
            best_time = time;
            best = i;
        }
    }
    close_arrays(views, is_dense ? 1 : 2);
    return PyLong_FromSsize_t(best);
}

PyDoc_STRVAR(align_doc,
"align(probs, ids, tokens, out): write the probabilities of `tokens`, 0.0 for those not in `ids`.\n\n"
"Both ids and tokens ascend.");

static PyObject *align(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[4];
    if (check_count(n_args, 4) || open_arrays(args, views, "dqqD"))
        return NULL;
    const double *probs = views[0].buf;
    const int64_t *ids = views[1].buf, *tokens = views[2].buf;
    double *out = views[3].buf;
    Py_ssize_t n_ids = length_of(&views[1]), n_tokens = length_of(&views[2]), place = 0;
    if (length_of(&views[0]) != n_ids || length_of(&views[3]) != n_tokens) {
        close_arrays(views, 4);
        PyErr_SetString(PyExc_ValueError, "probabilities and ids differ in length");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n_tokens; i++) {
        while (place < n_ids && ids[place] < tokens[i])
            place++;
        out[i] = place < n_ids && ids[place] == tokens[i] ? probs[place] : 0.0;
    }
    close_arrays(views, 4);
    Py_RETURN_NONE;
}

/* -- the module -------------------------------------------------------------------------------- */

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef functions[] = {
    FUNCTION(top_k), FUNCTION(cut), FUNCTION(place_at), FUNCTION(race), FUNCTION(align),
    {"scale_to_one", scale_to_one, METH_O, scale_to_one_doc}, {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_compiled", "Inner loops of laws; see compiled.py.", -1, functions};

PyMODINIT_FUNC PyInit__compiled(void)
{
    return PyModule_Create(&module);
}
