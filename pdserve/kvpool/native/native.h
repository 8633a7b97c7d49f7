/* What the files of the module `_native` share. Arguments and errors of its functions are those of _native.pyi. */
#include <Python.h>

#include <stdint.h>

enum { LEAST_HASHED = 241 }; /* bytes of a page: XXH3 has another rule for shorter inputs */

/* One page: the caller's segments [first, first + count) of the batch, and where it lies in the arena, if it does. */
typedef struct {
    unsigned char *slot;
    const unsigned char *row;
    uint64_t checksum, sequence, tag;
    Py_ssize_t first, count;
    uint64_t length;
    unsigned char outcome;
} Page;

typedef struct {
    Py_buffer arena, table, *segments;
    Py_ssize_t held, room, count;
    Page *pages;
    int is_read, hashes, is_late;
    double deadline_s;
} Batch;

/* Hold a page's segments, a sequence of buffers, until `native_let_go`. -1 with an error of Python's. */
int native_hold(Batch *batch, Page *page, PyObject *segments);
void native_let_go(Batch *batch);
/* Of the bytes in its segments, of LEAST_HASHED at least. */
uint64_t native_checksum(const Batch *batch, const Page *page);
/* Milliseconds to wait, at most; 0: the deadline has passed. */
int native_left_ms(double deadline_s);

PyObject *native_read(PyObject *module, PyObject *args);          /* copier.c */
PyObject *native_write(PyObject *module, PyObject *args);         /* copier.c */
PyObject *native_exchange(PyObject *module, PyObject *args);      /* frames.c */
PyObject *native_send_pages(PyObject *module, PyObject *args);    /* messages.c */
PyObject *native_receive_pages(PyObject *module, PyObject *args); /* messages.c */
void native_choose_copier(void); /* what this processor can do; once */
