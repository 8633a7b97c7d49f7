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

#include <string.h>

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

static PyObject *lines_add(HeaderLines *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 2 || !PyBytes_Check(given[0]) || !PyBytes_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "a header is two bytes objects");
        return NULL;
    }
    if (self->is_over || PyList_GET_SIZE(self->pairs) > self->most) Py_RETURN_NONE;
    PyObject *name = in_lower_case(given[0]);
    if (name == NULL) return NULL;
    PyObject *pair = PyTuple_Pack(2, name, given[1]);
    Py_DECREF(name);
    if (pair == NULL) return NULL;
    int failed = PyList_Append(self->pairs, pair);
    Py_DECREF(pair);
    if (failed) return NULL;
    Py_RETURN_NONE;
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
    {"joined", (PyCFunction)(void (*)(void))joined, METH_FASTCALL, "See heads.joined."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "pdserve.router.native._native", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    if (PyType_Ready(&lines_type)) return NULL;
    PyObject *class = PyObject_CallFunction((PyObject *)&PyType_Type, "s(){}", "Class");
    if (class == NULL) return NULL;
    of_classes = ((PyTypeObject *)class)->tp_dealloc;
    Py_DECREF(class);
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddObjectRef(module, "HeaderLines", (PyObject *)&lines_type)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
