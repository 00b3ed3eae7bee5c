/* The Python face of the exchange.
 *
 * An extension, because a call is what the exchange costs from Python: see docs in engine/exchange/native.py for
 * the measured ctypes and cffi. Only `wait`, `open` and `close` give up the interpreter lock: giving it up and
 * taking it back costs as much as the exchange, and a thread that gets it meanwhile keeps it up to 5 ms.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "exchange.h"

/* failed: called with (code, rank, channel, errno, seq), returns the exception to raise. */
typedef struct {
    PyObject_HEAD xc_handle* h;
    int rank;
    PyObject* failed;
} pair;

typedef struct {
    PyObject_HEAD pair* of;
    PyObject* peer;
    int channel;
} channel;

static PyObject* raise_failure(PyObject* failed, const xc_failure* why) {
    PyObject* error = PyObject_CallFunction(failed, "iiiiK", (int)why->code, why->rank, why->channel,
                                            why->error_number, (unsigned long long)why->seq);
    if (error) PyErr_SetObject((PyObject*)Py_TYPE(error), error);
    Py_XDECREF(error);
    return NULL;
}

static PyObject* raise_result(pair* p, int channel_, int result) {
    xc_failure why = {.code = XC_CLOSED, .rank = p->rank, .channel = channel_};
    if (p->h) {
        xc_why(p->h, result, &why);
        if (why.rank < 0) why.rank = p->rank;
    }
    return raise_failure(p->failed, &why);
}

/* Publishes (epoch, values), the first two of args; -1 with an exception where that fails. */
static int published(channel* self, PyObject* const* args, Py_ssize_t count, Py_ssize_t expected) {
    pair* p = self->of;
    if (!p->h || !p->h->alive) {
        raise_result(p, self->channel, p->h ? -XC_FORKED : -XC_CLOSED);
        return -1;
    }
    uint32_t wanted = p->h->lane[self->channel].words;
    if (count != expected || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != (Py_ssize_t)wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments: an epoch, a tuple of %u integers", expected, wanted);
        return -1;
    }
    int64_t words[XC_WORDS];
    for (uint32_t i = 0; i < wanted; i++) words[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(args[1], i));
    int64_t epoch = PyLong_AsLongLong(args[0]);
    if (PyErr_Occurred()) return -1;
    if (epoch < 0) {
        PyErr_Format(PyExc_ValueError, "epoch %lld is negative", (long long)epoch);
        return -1;
    }
    int result = xc_publish(p->h, self->channel, (uint64_t)epoch, words);
    if (result < 0) raise_result(p, self->channel, result);
    return result < 0 ? -1 : 0;
}

static PyObject* channel_publish(channel* self, PyObject* const* args, Py_ssize_t count) {
    if (published(self, args, count, 2)) return NULL;
    Py_RETURN_NONE;
}

static PyObject* heard(channel* self, uint64_t epoch, const int64_t* words) {
    Py_ssize_t n = self->of->h->lane[self->channel].words;
    PyObject* all = PyTuple_New(3);
    PyObject* values = PyTuple_New(n);
    PyObject* number = PyLong_FromUnsignedLongLong(epoch);
    int ok = all && values && number;
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        PyObject* word = PyLong_FromLongLong(words[i]);
        ok = word != NULL;
        if (ok) PyTuple_SET_ITEM(values, i, word);
    }
    if (!ok) {
        Py_XDECREF(all);
        Py_XDECREF(values);
        Py_XDECREF(number);
        return NULL;
    }
    PyTuple_SET_ITEM(all, 0, number);
    PyTuple_SET_ITEM(all, 1, Py_NewRef(self->peer));
    PyTuple_SET_ITEM(all, 2, values);
    return all;
}

static PyObject* looked(channel* self, PyObject* spin_ns) {
    pair* p = self->of;
    int64_t spin = spin_ns ? PyLong_AsLongLong(spin_ns) : 0;
    if (spin == -1 && PyErr_Occurred()) return NULL;
    uint64_t epoch = 0;
    int64_t words[XC_WORDS];
    int result = xc_poll(p->h, self->channel, spin, &epoch, words);
    if (result == 1) return heard(self, epoch, words);
    if (result < 0) return raise_result(p, self->channel, result);
    Py_RETURN_NONE;
}

static PyObject* channel_poll(channel* self, PyObject* const* args, Py_ssize_t count) {
    if (!self->of->h) return raise_result(self->of, self->channel, -XC_CLOSED);
    return looked(self, count ? args[0] : NULL);
}

static PyObject* channel_exchange(channel* self, PyObject* const* args, Py_ssize_t count) {
    return published(self, args, count, 3) ? NULL : looked(self, args[2]);
}

static PyObject* channel_arm(channel* self, PyObject* unused) {
    (void)unused;
    pair* p = self->of;
    int result = p->h ? xc_arm(p->h, self->channel) : -XC_CLOSED;
    return result < 0 ? raise_result(p, self->channel, result) : PyBool_FromLong(result);
}

static PyObject* channel_timings(channel* self, PyObject* unused) {
    (void)unused;
    pair* p = self->of;
    if (!p->h || !p->h->alive) return raise_result(p, self->channel, p->h ? -XC_FORKED : -XC_CLOSED);
    int64_t t[4];
    xc_timings(p->h, self->channel, t);
    return Py_BuildValue("LLLL", (long long)t[0], (long long)t[1], (long long)t[2], (long long)t[3]);
}

static PyObject* channel_times(channel* self, PyObject* unused) {
    (void)unused;
    pair* p = self->of;
    if (!p->h || !p->h->alive) return raise_result(p, self->channel, p->h ? -XC_FORKED : -XC_CLOSED);
    const xc_times* times = &p->h->lane[self->channel].times;
    return Py_BuildValue("y#y#", (const char*)times->counts, (Py_ssize_t)sizeof times->counts,
                         (const char*)times->sums, (Py_ssize_t)sizeof times->sums);
}

static void channel_free(channel* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_XDECREF(self->of);
    Py_XDECREF(self->peer);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef channel_methods[] = {
    {"publish", (PyCFunction)(void (*)(void))channel_publish, METH_FASTCALL, "(epoch, values)"},
    {"poll", (PyCFunction)(void (*)(void))channel_poll, METH_FASTCALL,
     "(spin_ns=0) -> (epoch, src, values) | None"},
    {"exchange", (PyCFunction)(void (*)(void))channel_exchange, METH_FASTCALL,
     "(epoch, values, spin_ns): publish, then poll"},
    {"arm", (PyCFunction)channel_arm, METH_NOARGS, "-> True where something has arrived already"},
    {"timings", (PyCFunction)channel_timings, METH_NOARGS, "-> exchange, peer wait, skew, post-arrival; ns"},
    {"times", (PyCFunction)channel_times, METH_NOARGS,
     "-> uint64[4, 16] exchanges by duration, int64[4] nanoseconds in all; rows as in timings"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot channel_slots[] = {{Py_tp_methods, channel_methods}, {Py_tp_dealloc, channel_free}, {0, NULL}};
static PyType_Spec channel_spec = {
    .name = "engine.native._exchange.Channel",
    .basicsize = sizeof(channel),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = channel_slots,
};
static PyObject *channel_type, *pair_type;

static PyObject* pair_channel(pair* self, PyObject* arg) {
    long number = PyLong_AsLong(arg);
    if (PyErr_Occurred()) return NULL;
    if (number < 0 || number >= XC_CHANNELS) return PyErr_Format(PyExc_ValueError, "no channel %ld", number);
    channel* made = PyObject_New(channel, (PyTypeObject*)channel_type);
    if (!made) return NULL;
    made->of = (pair*)Py_NewRef(self);
    made->channel = (int)number;
    made->peer = PyLong_FromLong(!self->rank);
    return (PyObject*)made;
}

static PyObject* pair_wait(pair* self, PyObject* unused) {
    (void)unused;
    xc_handle* h = self->h;
    int result = -XC_CLOSED;
    xc_failure why = {.code = XC_CLOSED, .rank = self->rank};
    if (h) {
        /* Counted here, with the lock held: `close` waits for it before the page goes. */
        if (h->alive) atomic_fetch_add(&h->sleepers, 1);
        Py_BEGIN_ALLOW_THREADS;
        result = xc_wait(h);
        if (result < 0) xc_why(h, result, &why);
        if (why.rank < 0) why.rank = self->rank;
        Py_END_ALLOW_THREADS;
        if (h->alive) atomic_fetch_sub(&h->sleepers, 1);
    }
    return result < 0 ? raise_failure(self->failed, &why) : PyLong_FromLong(result);
}

static PyObject* pair_close(pair* self, PyObject* unused) {
    (void)unused;
    xc_handle* h = self->h;
    self->h = NULL;
    if (h) {
        Py_BEGIN_ALLOW_THREADS;
        xc_close(h);
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

static void pair_free(pair* self) {
    PyTypeObject* type = Py_TYPE(self);
    if (self->h) xc_close(self->h);
    Py_XDECREF(self->failed);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef pair_methods[] = {
    {"channel", (PyCFunction)pair_channel, METH_O, "(number) -> Channel"},
    {"wait", (PyCFunction)pair_wait, METH_NOARGS, "-> bits of the armed channels that have an arrival"},
    {"close", (PyCFunction)pair_close, METH_NOARGS, "leaves; the peer hears it"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot pair_slots[] = {{Py_tp_methods, pair_methods}, {Py_tp_dealloc, pair_free}, {0, NULL}};
static PyType_Spec pair_spec = {
    .name = "engine.native._exchange.Pair",
    .basicsize = sizeof(pair),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = pair_slots,
};

static PyObject* open_pair(PyObject* module, PyObject* args) {
    (void)module;
    xc_options o;
    PyObject* failed;
    xc_failure why;
    long long attach_ns, timeout_ns;
    if (!PyArg_ParseTuple(args, "siLL(II)O", &o.session, &o.rank, &attach_ns, &timeout_ns, &o.words[0],
                          &o.words[1], &failed))
        return NULL;
    o.attach_ns = attach_ns;
    o.timeout_ns = timeout_ns;
    xc_handle* h;
    Py_BEGIN_ALLOW_THREADS;
    h = xc_open(&o, &why);
    Py_END_ALLOW_THREADS;
    if (!h) return raise_failure(failed, &why);
    pair* made = PyObject_New(pair, (PyTypeObject*)pair_type);
    if (!made) {
        xc_close(h);
        return NULL;
    }
    made->h = h;
    made->rank = o.rank;
    made->failed = Py_NewRef(failed);
    return (PyObject*)made;
}

static PyObject* is_stale(PyObject* module, PyObject* arg) {
    (void)module;
    const char* session = PyUnicode_AsUTF8(arg);
    return session ? PyBool_FromLong(xc_is_stale(session)) : NULL;
}

static PyMethodDef functions[] = {
    {"open", open_pair, METH_VARARGS, "(session, rank, attach_ns, timeout_ns, (words, words), failed) -> Pair"},
    {"is_stale", is_stale, METH_O, "(session): a name whose creator is dead, or never finished it"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_exchange", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__exchange(void) {
    channel_type = PyType_FromSpec(&channel_spec);
    pair_type = PyType_FromSpec(&pair_spec);
    PyObject* module = channel_type && pair_type ? PyModule_Create(&definition) : NULL;
    PyObject* bounds = module ? PyTuple_New(XC_BUCKETS - 1) : NULL;
    for (int i = 0; bounds && i < XC_BUCKETS - 1; i++)
        PyTuple_SET_ITEM(bounds, i, PyLong_FromLongLong(xc_bounds[i]));
    if (module && (!bounds || PyModule_AddObjectRef(module, "BOUNDS_NS", bounds) ||
                   PyModule_AddIntConstant(module, "ABI", XC_ABI_VERSION) ||
                   PyModule_AddStringConstant(module, "PREFIX", XC_PREFIX)))
        Py_CLEAR(module);
    Py_XDECREF(bounds);
    return module;
}
