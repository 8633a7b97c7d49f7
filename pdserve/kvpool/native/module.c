#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "native.h"

static PyMethodDef methods[] = {
    {"read", native_read, METH_VARARGS, "See copying.read."},
    {"write", native_write, METH_VARARGS, "See copying.write."},
    {"send_pages", native_send_pages, METH_VARARGS, "See page_messages.send."},
    {"receive_pages", native_receive_pages, METH_VARARGS, "See page_messages.receive."},
    {"exchange", native_exchange, METH_VARARGS, "See frames.exchange."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "pdserve.kvpool.native._native", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    native_choose_copier();
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "INTERFACE", 2) < 0)
        Py_CLEAR(module);
    return module;
}
