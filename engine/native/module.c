/* The Python face of the CPU kernels. Tensors arrive as addresses and sizes, which the callers have checked. Every
 * call gives up the interpreter lock, so that the event loop runs beside a step. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attend.h"
#include "compress.h"
#include "gemm.h"
#include "mask.h"
#include "moe.h"
#include "norm.h"

#ifndef LEVEL
#define LEVEL base
#endif
#define GLUE(a, b) a##b
#define NAMED(a, b) GLUE(a, b)
#define TEXT(a) #a
#define QUOTED(a) TEXT(a)

typedef struct {
    PyObject* const* args;
    Py_ssize_t count, at;
} reader;

static PyObject* next(reader* r) {
    if (r->at < r->count) return r->args[r->at++];
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%zd arguments are too few", r->count);
    return NULL;
}

static int64_t whole(reader* r) {
    PyObject* o = next(r);
    return o ? PyLong_AsLongLong(o) : 0;
}

static void* address(reader* r) { return (void*)(intptr_t)whole(r); }

static float real(reader* r) {
    PyObject* o = next(r);
    return o ? (float)PyFloat_AsDouble(o) : 0.0f;
}

static keys read_keys(reader* r) {
    keys k;
    k.pool = address(r);
    k.rows = address(r);
    k.bias = address(r);
    k.count = whole(r);
    return k;
}

static packed read_packed(reader* r) {
    packed w;
    w.panels = address(r);
    w.n = whole(r);
    w.k = whole(r);
    w.bf16 = (int)whole(r);
    return w;
}

static int ready(const reader* r) {
    if (r->at != r->count && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are taken", r->count, r->at);
    return !PyErr_Occurred();
}

#define FACE(name) static PyObject* py_##name(PyObject* self, PyObject* const* args, Py_ssize_t count)
#define BEGIN(r) \
    (void)self;  \
    reader r = {args, count, 0}
#define CALL(r, ...)                   \
    do {                               \
        if (!ready(&(r))) return NULL; \
        Py_BEGIN_ALLOW_THREADS;        \
        __VA_ARGS__;                   \
        Py_END_ALLOW_THREADS;          \
    } while (0)

FACE(pack) {
    BEGIN(r);
    void* to = address(&r);
    const float* from = address(&r);
    int64_t n = whole(&r), k = whole(&r), bf16 = whole(&r);
    CALL(r, pack(to, from, n, k, (int)bf16));
    Py_RETURN_NONE;
}

FACE(gemm) {
    BEGIN(r);
    float* y = address(&r);
    int64_t y_stride = whole(&r);
    const float* x = address(&r);
    int64_t x_stride = whole(&r);
    packed w = read_packed(&r);
    int64_t rows = whole(&r);
    CALL(r, gemm(y, y_stride, x, x_stride, w, rows));
    Py_RETURN_NONE;
}

FACE(rms_norm) {
    BEGIN(r);
    float* out = address(&r);
    const float* x = address(&r);
    int64_t x_stride = whole(&r);
    const float* weight = address(&r);
    int64_t rows = whole(&r), n = whole(&r);
    float eps = real(&r);
    CALL(r, rms_norm(out, x, x_stride, weight, rows, n, eps));
    Py_RETURN_NONE;
}

FACE(rotate) {
    BEGIN(r);
    float* x = address(&r);
    const float* turns = address(&r);
    int64_t rows = whole(&r), heads = whole(&r), stride = whole(&r), n = whole(&r), pairs = whole(&r);
    CALL(r, rotate(x, turns, rows, heads, stride, n, pairs));
    Py_RETURN_NONE;
}

FACE(mhc_pre) {
    BEGIN(r);
    float *out = address(&r), *post = address(&r), *comb = address(&r);
    const float *x = address(&r), *mixed = address(&r), *scale = address(&r), *base = address(&r);
    const float* weight = address(&r);
    int64_t tokens = whole(&r), width = whole(&r), iterations = whole(&r);
    float eps = real(&r), norm_eps = real(&r);
    CALL(r, mhc_pre(out, post, comb, x, mixed, scale, base, weight, tokens, width, iterations, eps, norm_eps));
    Py_RETURN_NONE;
}

FACE(mhc_post) {
    BEGIN(r);
    float* out = address(&r);
    const float *y = address(&r), *x = address(&r), *post = address(&r), *comb = address(&r);
    int64_t tokens = whole(&r), width = whole(&r);
    CALL(r, mhc_post(out, y, x, post, comb, tokens, width));
    Py_RETURN_NONE;
}

FACE(attend) {
    BEGIN(r);
    float* out = address(&r);
    const float* q = address(&r);
    const int64_t* places = address(&r);
    int64_t blocks = whole(&r), queries = whole(&r);
    keys sources[2];
    sources[0] = read_keys(&r);
    sources[1] = read_keys(&r);
    const float* sink = address(&r);
    float scale = real(&r);
    int64_t heads = whole(&r), width = whole(&r);
    int failed = 0;
    CALL(r, failed = attend(out, q, places, blocks, queries, sources, sources[1].pool ? 2 : 1, sink, scale, heads,
                            width));
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

FACE(index_scores) {
    BEGIN(r);
    float* scores = address(&r);
    const float *q = address(&r), *weight = address(&r);
    keys entries = read_keys(&r);
    int64_t blocks = whole(&r), queries = whole(&r), heads = whole(&r), width = whole(&r);
    int failed = 0;
    CALL(r, failed = index_scores(scores, q, weight, entries, blocks, queries, heads, width));
    if (failed)
        return PyErr_Format(PyExc_ValueError, "index keys of %lld channels are too wide", (long long)width);
    Py_RETURN_NONE;
}

FACE(swiglu) {
    BEGIN(r);
    float* out = address(&r);
    const float* in = address(&r);
    int64_t rows = whole(&r), inner = whole(&r);
    float limit = real(&r);
    CALL(r, swiglu(out, in, rows, inner, limit));
    Py_RETURN_NONE;
}

FACE(moe) {
    BEGIN(r);
    float* out = address(&r);
    const float* x = address(&r);
    const int64_t* ids = address(&r);
    const float* weights = address(&r);
    int64_t tokens = whole(&r), choices = whole(&r);
    experts e;
    e.up = address(&r);
    e.down = address(&r);
    e.experts = whole(&r);
    e.width = whole(&r);
    e.inner = whole(&r);
    e.bf16 = (int)whole(&r);
    e.limit = real(&r);
    int failed = 0;
    CALL(r, failed = moe(out, x, ids, weights, tokens, choices, e));
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

FACE(route) {
    BEGIN(r);
    int64_t* ids = address(&r);
    float* weights = address(&r);
    const float *logits = address(&r), *bias = address(&r);
    const int64_t* chosen = address(&r);
    int64_t rows = whole(&r), n = whole(&r), choices = whole(&r);
    float scaling = real(&r);
    CALL(r, route(ids, weights, logits, bias, chosen, rows, n, choices, scaling));
    Py_RETURN_NONE;
}

FACE(pool_windows) {
    BEGIN(r);
    float* out = address(&r);
    const float *latents = address(&r), *scores = address(&r);
    int64_t windows = whole(&r), items = whole(&r), stride = whole(&r), width = whole(&r);
    CALL(r, pool_windows(out, latents, scores, windows, items, stride, width));
    Py_RETURN_NONE;
}

FACE(fold) {
    BEGIN(r);
    float* state = address(&r);
    const float* rows = address(&r);
    const uint8_t* valid = address(&r);
    int64_t windows = whole(&r), items = whole(&r), width = whole(&r);
    CALL(r, fold(state, rows, valid, windows, items, width));
    Py_RETURN_NONE;
}

FACE(forbid) {
    BEGIN(r);
    float* logits = address(&r);
    int64_t stride = whole(&r), rows = whole(&r);
    const int64_t* places = address(&r);
    const int32_t* masks = address(&r);
    int64_t masked = whole(&r), words = whole(&r), vocabulary = whole(&r);
    int failed = 0;
    CALL(r, failed = forbid(logits, stride, rows, places, masks, masked, words, vocabulary));
    if (failed) return PyErr_Format(PyExc_ValueError, "a mask is for none of %lld rows", (long long)rows);
    Py_RETURN_NONE;
}

FACE(favour) {
    BEGIN(r);
    float* best = address(&r);
    int64_t* first = address(&r);
    const float* logits = address(&r);
    int64_t stride = whole(&r), rows = whole(&r);
    const int64_t* places = address(&r);
    const int32_t* masks = address(&r);
    int64_t masked = whole(&r), words = whole(&r), vocabulary = whole(&r);
    int failed = 0;
    CALL(r, failed = favour(best, first, logits, stride, rows, places, masks, masked, words, vocabulary));
    if (failed)
        return PyErr_Format(PyExc_ValueError, "masks aren't for ascending ones of %lld rows", (long long)rows);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
    METHOD(pack),    METHOD(gemm),     METHOD(rms_norm), METHOD(rotate),
    METHOD(mhc_pre), METHOD(mhc_post), METHOD(attend),   METHOD(index_scores),
    METHOD(swiglu),  METHOD(moe),      METHOD(route),    METHOD(pool_windows),
    METHOD(fold),    METHOD(forbid),   METHOD(favour),   {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = QUOTED(NAMED(_cpu_, LEVEL)), .m_size = 0,
                                        .m_methods = methods};

PyMODINIT_FUNC NAMED(PyInit__cpu_, LEVEL)(void);

PyMODINIT_FUNC NAMED(PyInit__cpu_, LEVEL)(void) { return PyModule_Create(&definition); }
