/* Gathers the header lines that a parser of HTTP finds, and looks for words in long bodies: see heads.py and
 * scan.py, which say what each function does and have the same in Python.
 *
 * Also copies objects that have slots only: see slots.py.
 *
 * The parser decides what is a header; here names are put in lower case, and lines are kept or joined. Nothing is
 * kept beyond the bound that the maker gives, nor when the head is over: a trailer is no header.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <string.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *pairs;
    Py_ssize_t most;
    int is_over;
} HeaderLines;

static PyObject *in_lower_case(PyObject *name) {
    const unsigned char *spelt = (const unsigned char *)PyBytes_AS_STRING(name);
    Py_ssize_t length = PyBytes_GET_SIZE(name), at = 0;
    while (at < length && !(spelt[at] >= 'A' && spelt[at] <= 'Z')) at++;
    if (at == length) return Py_NewRef(name);
    PyObject *made = PyBytes_FromStringAndSize((const char *)spelt, length);
    if (made == NULL) return NULL;
    char *lower = PyBytes_AS_STRING(made);
    for (; at < length; at++)
        if (spelt[at] >= 'A' && spelt[at] <= 'Z') lower[at] = (char)(spelt[at] | 0x20);
    return made;
}

/* Append a header, (name, value); not when the head is over. */
static PyObject *add_pair(PyObject *pairs, PyObject *const *given, Py_ssize_t count, int is_over) {
    if (count != 2 || !PyBytes_Check(given[0]) || !PyBytes_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "a header is two bytes objects");
        return NULL;
    }
    if (is_over) Py_RETURN_NONE;
    PyObject *name = in_lower_case(given[0]);
    if (name == NULL) return NULL;
    PyObject *pair = PyTuple_Pack(2, name, given[1]);
    Py_DECREF(name);
    if (pair == NULL) return NULL;
    int failed = PyList_Append(pairs, pair);
    Py_DECREF(pair);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *lines_add(HeaderLines *self, PyObject *const *given, Py_ssize_t count) {
    return add_pair(self->pairs, given, count, self->is_over || PyList_GET_SIZE(self->pairs) > self->most);
}

static PyObject *lines_take(HeaderLines *self, PyObject *Py_UNUSED(none)) {
    PyObject *next = PyList_New(0), *taken = self->pairs;
    if (next == NULL) return NULL;
    self->pairs = next;
    self->is_over = 1;
    return taken;
}

static PyObject *lines_begin(HeaderLines *self, PyObject *Py_UNUSED(none)) {
    self->is_over = 0;
    if (PyList_SetSlice(self->pairs, 0, PyList_GET_SIZE(self->pairs), NULL)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *lines_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    Py_ssize_t most;
    static char *names[] = {"most", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, named, "n", names, &most)) return NULL;
    HeaderLines *self = (HeaderLines *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->most = most;
    self->is_over = 1;
    self->pairs = PyList_New(0);
    if (self->pairs == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void lines_dealloc(HeaderLines *self) { /* holds bytes only: in no cycle, and not tracked */
    Py_XDECREF(self->pairs);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *lines_is_open(HeaderLines *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(!self->is_over);
}

static PyObject *lines_count(HeaderLines *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(PyList_GET_SIZE(self->pairs));
}

static PyMethodDef lines_methods[] = {
    {"add", (PyCFunction)(void (*)(void))lines_add, METH_FASTCALL, "See heads.HeaderLines."},
    {"take", (PyCFunction)lines_take, METH_NOARGS, "See heads.HeaderLines."},
    {"begin", (PyCFunction)lines_begin, METH_NOARGS, "See heads.HeaderLines."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef lines_members[] = {
    {"is_open", (getter)lines_is_open, NULL, "See heads.HeaderLines.", NULL},
    {"count", (getter)lines_count, NULL, "See heads.HeaderLines.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject lines_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pdserve.router.native._native.HeaderLines",
    .tp_basicsize = sizeof(HeaderLines),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = lines_new,
    .tp_dealloc = (destructor)lines_dealloc,
    .tp_methods = lines_methods,
    .tp_getset = lines_members,
};

/* An answer as its parser finds it: see answers.py. */
typedef struct {
    PyObject_HEAD
    PyObject *parser, *status, *pairs, *pieces, *rest, *is_whole, *keeps;
    int is_head_over;
} Answer;

static PyObject *get_status_code, *should_keep_alive, *zero, *nothing; /* names and values that are needed often */

static int is_set(PyObject *value) { return value != NULL && value != Py_False && value != zero; }

static PyObject *answer_begin(Answer *self, PyObject *Py_UNUSED(none)) {
    if (is_set(self->is_whole)) Py_RETURN_NONE;
    PyObject *pairs = PyList_New(0);
    if (pairs == NULL) return NULL;
    Py_XSETREF(self->pairs, pairs);
    self->is_head_over = 0;
    Py_RETURN_NONE;
}

static PyObject *answer_header(Answer *self, PyObject *const *given, Py_ssize_t count) {
    return add_pair(self->pairs, given, count, self->is_head_over);
}

static PyObject *answer_head_over(Answer *self, PyObject *Py_UNUSED(none)) {
    self->is_head_over = 1;
    if (is_set(self->status)) { /* a second answer to one request: out of step */
        Py_XSETREF(self->keeps, Py_NewRef(Py_False));
        Py_RETURN_NONE;
    }
    PyObject *status = PyObject_CallMethodNoArgs(self->parser, get_status_code);
    if (status == NULL) return NULL;
    long number = PyLong_AsLong(status);
    if (number >= 200 && number <= 599) Py_XSETREF(self->status, Py_NewRef(status));
    Py_DECREF(status);
    if (number > 599) return PyErr_Format(PyExc_ValueError, "its status is %ld", number);
    Py_RETURN_NONE;
}

static PyObject *answer_piece(Answer *self, PyObject *piece) {
    if (PyList_Append(self->pieces, piece)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *answer_over(Answer *self, PyObject *Py_UNUSED(none)) {
    if (!is_set(self->status) || is_set(self->is_whole)) Py_RETURN_NONE;
    PyObject *pieces = self->pieces, *rest = nothing;
    Py_ssize_t count = PyList_GET_SIZE(pieces);
    if (count == 1) rest = Py_NewRef(PyList_GET_ITEM(pieces, 0));
    else rest = PyObject_CallMethod(nothing, "join", "O", pieces);
    if (rest == NULL || PyList_SetSlice(pieces, 0, count, NULL)) return NULL;
    Py_XSETREF(self->rest, rest);
    Py_XSETREF(self->is_whole, Py_NewRef(Py_True));
    PyObject *keeps = PyObject_CallMethodNoArgs(self->parser, should_keep_alive);
    if (keeps == NULL) return NULL;
    if (!is_set(keeps)) Py_XSETREF(self->keeps, Py_NewRef(Py_False));
    Py_DECREF(keeps);
    Py_RETURN_NONE;
}

static int answer_traverse(Answer *self, visitproc visit, void *arg) {
    for (PyObject **each = &self->parser; each <= &self->keeps; each++) Py_VISIT(*each);
    return 0;
}

static int answer_clear(Answer *self) {
    for (PyObject **each = &self->parser; each <= &self->keeps; each++) Py_CLEAR(*each);
    return 0;
}

static void answer_dealloc(Answer *self) {
    PyObject_GC_UnTrack(self);
    answer_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *answer_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(named)) {
    Answer *self = (Answer *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->pieces = PyList_New(0);
    self->pairs = PyList_New(0);
    self->parser = Py_NewRef(Py_None);
    self->status = Py_NewRef(zero);
    self->rest = Py_NewRef(nothing);
    self->is_whole = Py_NewRef(Py_False);
    self->keeps = Py_NewRef(Py_True);
    self->is_head_over = 1;
    if (self->pieces == NULL || self->pairs == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef answer_methods[] = {
    {"on_message_begin", (PyCFunction)answer_begin, METH_NOARGS, "See answers.Answer."},
    {"on_header", (PyCFunction)(void (*)(void))answer_header, METH_FASTCALL, "See answers.Answer."},
    {"on_headers_complete", (PyCFunction)answer_head_over, METH_NOARGS, "See answers.Answer."},
    {"on_body", (PyCFunction)answer_piece, METH_O, "See answers.Answer."},
    {"on_message_complete", (PyCFunction)answer_over, METH_NOARGS, "See answers.Answer."},
    {NULL, NULL, 0, NULL},
};

#define FIELD(name, flags) {#name, T_OBJECT_EX, offsetof(Answer, name), flags, "See answers.Answer."}
static PyMemberDef answer_members[] = {
    FIELD(parser, 0), FIELD(status, 0), FIELD(pairs, READONLY), FIELD(pieces, READONLY),
    FIELD(rest, 0), FIELD(is_whole, 0), FIELD(keeps, 0), {NULL},
};

static PyTypeObject answer_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pdserve.router.native._native.Answer",
    .tp_basicsize = sizeof(Answer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = answer_new,
    .tp_traverse = (traverseproc)answer_traverse,
    .tp_clear = (inquiry)answer_clear,
    .tp_dealloc = (destructor)answer_dealloc,
    .tp_methods = answer_methods,
    .tp_members = answer_members,
};

/* The bytes of a pair's name and value; -1 with an error set for what is no pair. */
static int parts_of(PyObject *pair, PyObject **name, PyObject **value) {
    if (PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2) {
        *name = PyTuple_GET_ITEM(pair, 0);
        *value = PyTuple_GET_ITEM(pair, 1);
        if (PyBytes_Check(*name) && PyBytes_Check(*value)) return 0;
    }
    PyErr_SetString(PyExc_TypeError, "a header is two bytes objects");
    return -1;
}

/* Of one line of `joined`: -1 with an error set, 0: it is left out, else its bytes. */
static Py_ssize_t line_length(PyObject *pair, PyObject *but) {
    PyObject *name, *value;
    if (parts_of(pair, &name, &value)) return -1;
    int is_out = PySet_Contains(but, name);
    if (is_out) return is_out < 0 ? -1 : 0;
    return PyBytes_GET_SIZE(name) + PyBytes_GET_SIZE(value) + 4;
}

static PyObject *joined(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(given[0]) || !PyAnySet_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "joined takes a list of headers and a set of names");
        return NULL;
    }
    PyObject *pairs = given[0], *but = given[1];
    Py_ssize_t all = 0, size = PyList_GET_SIZE(pairs);
    for (Py_ssize_t i = 0; i < size; i++) {
        Py_ssize_t length = line_length(PyList_GET_ITEM(pairs, i), but);
        if (length < 0) return NULL;
        all += length;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, all);
    if (made == NULL) return NULL;
    char *to = PyBytes_AS_STRING(made);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *pair = PyList_GET_ITEM(pairs, i), *name, *value;
        Py_ssize_t length = line_length(pair, but);
        if (length <= 0 || parts_of(pair, &name, &value)) continue;
        Py_ssize_t of_name = PyBytes_GET_SIZE(name), of_value = PyBytes_GET_SIZE(value);
        memcpy(to, PyBytes_AS_STRING(name), of_name);
        memcpy(to + of_name, ": ", 2);
        memcpy(to + of_name + 2, PyBytes_AS_STRING(value), of_value);
        memcpy(to + length - 2, "\r\n", 2);
        to += length;
    }
    return made;
}

/* Whether one of `tails` stands at `at`; -1 with an error set for what is not bytes. */
static int stands_at(const char *at, const char *end, PyObject *tails) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tails); i++) {
        PyObject *tail = PyTuple_GET_ITEM(tails, i);
        if (!PyBytes_Check(tail)) {
            PyErr_SetString(PyExc_TypeError, "words are bytes");
            return -1;
        }
        Py_ssize_t length = PyBytes_GET_SIZE(tail);
        if (length && end - at >= length && memcmp(at, PyBytes_AS_STRING(tail), length) == 0) return 1;
    }
    return 0;
}

static PyObject *has_after(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count) {
    if (count != 3 || !PyBytes_Check(given[1]) || PyBytes_GET_SIZE(given[1]) != 1 || !PyTuple_Check(given[2])) {
        PyErr_SetString(PyExc_TypeError, "has_after takes a buffer, one byte and a tuple of bytes");
        return NULL;
    }
    Py_buffer text;
    if (PyObject_GetBuffer(given[0], &text, PyBUF_SIMPLE)) return NULL;
    const char *at = text.buf, *end = at + text.len;
    int mark = PyBytes_AS_STRING(given[1])[0], found = 0;
    unsigned char begins[256] = {0}; /* bytes with which a word begins: most marks are passed by one look */
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[2]); i++) {
        PyObject *word = PyTuple_GET_ITEM(given[2], i);
        if (PyBytes_Check(word) && PyBytes_GET_SIZE(word)) begins[(unsigned char)PyBytes_AS_STRING(word)[0]] = 1;
    }
    while (!found && at < end && (at = memchr(at, mark, end - at)) != NULL)
        if (++at < end && begins[(unsigned char)*at]) found = stands_at(at, end, given[2]);
    PyBuffer_Release(&text);
    if (found < 0) return NULL;
    return PyBool_FromLong(found);
}

/* Awaited, it hands None to who drives the coroutine, once: see driven.py. */
static PyObject *once; /* (None,) */

static PyObject *pause_await(PyObject *Py_UNUSED(self)) { return PyObject_GetIter(once); }

static PyAsyncMethods pause_async = {.am_await = pause_await};

static PyTypeObject pause_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pdserve.router.native._native.Pause",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_as_async = &pause_async,
};

static PyObject *number_after(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count) {
    if (count != 2 || !PyBytes_Check(given[0]) || !PyBytes_Check(given[1]) || !PyBytes_GET_SIZE(given[1])) {
        PyErr_SetString(PyExc_TypeError, "number_after takes two bytes objects, the second not empty");
        return NULL;
    }
    const char *text = PyBytes_AS_STRING(given[0]), *mark = PyBytes_AS_STRING(given[1]);
    const char *end = text + PyBytes_GET_SIZE(given[0]);
    Py_ssize_t length = PyBytes_GET_SIZE(given[1]);
    const char *at = end - length;
    while (at >= text && (*at != *mark || memcmp(at, mark, length))) at--;
    if (at < text) return PyLong_FromLong(0);
    at += length;
    while (at < end && (*at == ' ' || (*at >= '\t' && *at <= '\r'))) at++;
    long long number = 0;
    const char *digits = at;
    for (; at < end && at - digits < 15 && *at >= '0' && *at <= '9'; at++) number = 10 * number + (*at - '0');
    if (at < end && (Py_ISALNUM(*at) || *at == '_')) number = 0;
    return PyLong_FromLongLong(number);
}

static destructor of_classes; /* tp_dealloc of each class that a class statement has made */

/* Whether all that an object of this type has are its slots, each a reference. */
static int has_slots_only(PyTypeObject *type) {
    if (type->tp_itemsize || type->tp_dictoffset || type->tp_weaklistoffset) return 0;
    for (; type != &PyBaseObject_Type; type = type->tp_base)
        if (type == NULL || type->tp_dealloc != of_classes) return 0;
    return 1;
}

static PyObject *copied(PyObject *Py_UNUSED(module), PyObject *of) {
    PyTypeObject *type = Py_TYPE(of);
    if (!has_slots_only(type)) {
        PyErr_Format(PyExc_TypeError, "%.100s has more than slots", type->tp_name);
        return NULL;
    }
    PyObject *made = type->tp_alloc(type, 0);
    if (made == NULL) return NULL;
    Py_ssize_t first = sizeof(PyObject) / sizeof(PyObject *), end = type->tp_basicsize / sizeof(PyObject *);
    for (Py_ssize_t i = first; i < end; i++) ((PyObject **)made)[i] = Py_XNewRef(((PyObject **)of)[i]);
    return made;
}

static PyMethodDef methods[] = {
    {"copied", (PyCFunction)copied, METH_O, "See slots.copied."},
    {"has_after", (PyCFunction)(void (*)(void))has_after, METH_FASTCALL, "See scan.has_after."},
    {"number_after", (PyCFunction)(void (*)(void))number_after, METH_FASTCALL, "See scan.number_after."},
    {"joined", (PyCFunction)(void (*)(void))joined, METH_FASTCALL, "See heads.joined."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "pdserve.router.native._native", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    get_status_code = PyUnicode_InternFromString("get_status_code");
    should_keep_alive = PyUnicode_InternFromString("should_keep_alive");
    zero = PyLong_FromLong(0);
    nothing = PyBytes_FromStringAndSize(NULL, 0);
    once = PyTuple_Pack(1, Py_None);
    if (!get_status_code || !should_keep_alive || !zero || !nothing || !once) return NULL;
    if (PyType_Ready(&lines_type) || PyType_Ready(&answer_type) || PyType_Ready(&pause_type)) return NULL;
    PyObject *class = PyObject_CallFunction((PyObject *)&PyType_Type, "s(){}", "Class");
    if (class == NULL) return NULL;
    of_classes = ((PyTypeObject *)class)->tp_dealloc;
    Py_DECREF(class);
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddObjectRef(module, "HeaderLines", (PyObject *)&lines_type) ||
        PyModule_AddObjectRef(module, "Answer", (PyObject *)&answer_type) ||
        PyModule_AddObjectRef(module, "Pause", (PyObject *)&pause_type)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
