#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "native.h"

static PyMethodDef methods[] = {
    {"read", native_read, METH_VARARGS, "See copying.read."},
    {"write", native_write, METH_VARARGS, "See copying.write."},
    {"copy", native_copy, METH_VARARGS, "See copying.copy."},
    {"exchange", native_exchange, METH_VARARGS, "See frames.exchange."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "pdserve.kvpool.native._native", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    native_choose_copier();
    return PyModule_Create(&definition);
}
