/* What top-k, top-p and min-p leave of a row, and its probabilities by the temperature.

   Sums run in numpy's order, and exponentials are the C library's, as in runtime/laws/truncation.py. */

#include "truncation.h"

#include <math.h>

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

/* Return how many of ranked tokens truncation leaves. */
static Py_ssize_t count_left(const double *values, Py_ssize_t count, double share, double lowest)
{
    if (share < 1.0) {
        double masses[MOST_RANKED];
        for (Py_ssize_t i = 0; i < count; i++)
            masses[i] = exp(values[i]);
        count = count_to_share(masses, count, share);
    }
    while (count > 1 && values[count - 1] < lowest)
        count--;
    return count;
}

Py_ssize_t law_of_row(
    const float *row, Py_ssize_t size, const Cuts *cuts, Py_ssize_t k, int64_t *ids, double *probs)
{
    Ranking ranking = {.count = 0, .most = k, .has_nan = 0};
    rank_row(&ranking, row, size);
    if (ranking.has_nan || !isfinite(ranking.values[0]))
        return 0;
    for (Py_ssize_t i = 0; i < k; i++) {
        ids[i] = ranking.ids[i];
        probs[i] = (double)ranking.values[i] - (double)ranking.values[0];
    }
    Py_ssize_t count = count_left(probs, k, cuts->share, cuts->lowest);
    order_by_id(ids, probs, count);
    for (Py_ssize_t i = 0; i < count; i++)
        probs[i] = exp(probs[i] / cuts->temperature);
    scale_weights(probs, count);
    return count;
}
