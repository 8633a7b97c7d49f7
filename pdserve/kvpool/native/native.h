/* The functions of the module `_native`: arguments and errors are those of _native.pyi. */
#include <Python.h>

PyObject *native_read(PyObject *module, PyObject *args);     /* copier.c */
PyObject *native_write(PyObject *module, PyObject *args);    /* copier.c */
PyObject *native_copy(PyObject *module, PyObject *args);     /* copier.c */
PyObject *native_exchange(PyObject *module, PyObject *args); /* frames.c */
void native_choose_copier(void); /* what this processor can do; once */
