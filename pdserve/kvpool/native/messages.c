/* Moves the pages of a batch between the caller's buffers and a socket, as the messages of transports/tcp/stream.py,
 * and lets the interpreter go once.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "native.h"

enum { PARTS = 256, SEND_BYTES = 4 << 20 }; /* of one call to the kernel; a socket takes about so many bytes at most */
enum { WAKE_BYTES = 256 << 10 };             /* that a reader waits for */

typedef struct {
    uint64_t tag, length; /* little-endian, as all of this module is */
} Head;

typedef struct {
    Batch batch;
    int fd;
    Head head;            /* of the message that arrives or leaves */
    Py_ssize_t head_bytes, done, hashed;
    uint64_t moved;       /* bytes of the page at `done` */
    int in_page, expects; /* expects: the socket is to be ready at more than one byte */
} Move;

/* 0: the socket is ready; or an error of errno. */
static int await_ready(int fd, short events, double deadline_s) {
    struct pollfd ready = {fd, events, 0};
    int wait_ms = native_left_ms(deadline_s);
    if (wait_ms == 0)
        return ETIMEDOUT;
    return poll(&ready, 1, wait_ms) < 0 ? errno : 0;
}

/* Have the socket be ready to read when so many bytes are there, not at each of the sender's segments. The rest of a
 * page comes whole, or the connection ends, which makes it ready too.
 */
static void expect(int fd, uint64_t bytes) {
    int least = bytes < WAKE_BYTES ? (int)bytes : WAKE_BYTES;
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least); /* a refusal costs time alone */
}

/* Add what is left of a page behind its first `from` bytes. Returns whether all of it had room. */
static int add_page(const Move *it, const Page *page, uint64_t from, struct iovec *parts, int *count) {
    for (Py_ssize_t k = page->first; k < page->first + page->count; k++) {
        const Py_buffer *segment = it->batch.segments + k;
        uint64_t length = segment->len;
        if (from >= length) {
            from -= length;
            continue;
        }
        if (*count == PARTS)
            return 0;
        parts[(*count)++] = (struct iovec){(char *)segment->buf + from, length - from};
        from = 0;
    }
    return 1;
}

/* Take messages until the last page, or another header than the next page's, which stays in `head`. */
static int receive_some(Move *it) {
    while (it->done < it->batch.count) {
        Page *page = it->batch.pages + it->done;
        if (!it->in_page && it->head_bytes == sizeof it->head) {
            if (it->head.tag != page->tag || it->head.length != page->length)
                return 0;
            it->in_page = 1, it->head_bytes = 0, it->moved = 0;
        }
        struct iovec parts[PARTS + 1];
        int count = 0, whole = !it->in_page || add_page(it, page, it->moved, parts, &count);
        if (whole && (!it->in_page || it->done + 1 < it->batch.count))
            parts[count++] = (struct iovec){(char *)&it->head + it->head_bytes, sizeof it->head - it->head_bytes};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        ssize_t got = recvmsg(it->fd, &message, MSG_DONTWAIT);
        if (got == 0)
            return ECONNRESET;
        if (got < 0) {
            int error = errno;
            if (error == EAGAIN) {
                expect(it->fd, it->in_page ? page->length - it->moved : 1);
                it->expects = 1;
                error = await_ready(it->fd, POLLIN, it->batch.deadline_s);
            }
            if (error)
                return error;
            continue;
        }
        if (native_left_ms(it->batch.deadline_s) == 0)
            return ETIMEDOUT; /* also if bytes never end */
        if (it->in_page) {
            uint64_t of_page = page->length - it->moved < (uint64_t)got ? page->length - it->moved : (uint64_t)got;
            it->moved += of_page, got -= of_page;
            if (it->moved == page->length) {
                page->checksum = it->batch.hashes ? native_checksum(&it->batch, page) : 0;
                it->in_page = 0, it->done++;
            }
        }
        it->head_bytes += got;
    }
    return 0;
}

static int send_some(Move *it) {
    while (it->done < it->batch.count) {
        struct iovec parts[PARTS + 1];
        Head heads[PARTS];
        int count = 0, headed = 0, whole = 1;
        uint64_t size = 0, from = it->moved; /* here with the header's bytes */
        for (Py_ssize_t i = it->done; i < it->batch.count && whole && count < PARTS && size < SEND_BYTES; i++) {
            Page *page = it->batch.pages + i;
            if (i == it->hashed) { /* now: then the kernel finds its bytes in the cache */
                page->checksum = it->batch.hashes ? native_checksum(&it->batch, page) : 0;
                it->hashed++;
            }
            if (from < sizeof *heads) {
                heads[headed] = (Head){page->tag, page->length};
                parts[count++] = (struct iovec){(char *)&heads[headed++] + from, sizeof *heads - from};
                from = sizeof *heads;
            }
            whole = add_page(it, page, from - sizeof *heads, parts, &count);
            size += page->length;
            from = 0;
        }
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        ssize_t sent = sendmsg(it->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            int error = errno == EAGAIN ? await_ready(it->fd, POLLOUT, it->batch.deadline_s) : errno;
            if (error)
                return error;
            continue;
        }
        if (native_left_ms(it->batch.deadline_s) == 0)
            return ETIMEDOUT;
        it->moved += sent;
        while (it->done < it->batch.count && it->moved >= sizeof *heads + it->batch.pages[it->done].length)
            it->moved -= sizeof *heads + it->batch.pages[it->done++].length;
    }
    return 0;
}

/* Hold the pages and their tags, a list of one number a page. */
static int hold_pages(Batch *batch, PyObject *pages, PyObject *tags) {
    PyObject *fast = PySequence_Fast(pages, "pages are a sequence");
    if (fast == NULL)
        return -1;
    batch->count = PySequence_Fast_GET_SIZE(fast);
    int failed = 0;
    if (!PyList_Check(tags) || PyList_GET_SIZE(tags) != batch->count) {
        PyErr_SetString(PyExc_ValueError, "tags are a list of one number a page");
        failed = 1;
    } else if ((failed = (batch->pages = PyMem_Calloc(batch->count + 1, sizeof *batch->pages)) == NULL)) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; !failed && i < batch->count; i++) {
        Page *page = batch->pages + i;
        failed = native_hold(batch, page, PySequence_Fast_GET_ITEM(fast, i)) < 0;
        if (!failed) {
            page->tag = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(tags, i));
            failed = PyErr_Occurred() != NULL;
        }
        if (!failed && page->length < (batch->hashes ? LEAST_HASHED : 1)) {
            PyErr_SetString(PyExc_ValueError, "a page too short to be moved here");
            failed = 1;
        }
    }
    Py_DECREF(fast);
    return failed ? -1 : 0;
}

/* Move until it is done. Returns the checksums of the pages that are done; NULL with an error of Python's. */
static PyObject *move_all(Move *it, int (*some)(Move *)) {
    int error;
    do {
        Py_BEGIN_ALLOW_THREADS
        error = some(it);
        Py_END_ALLOW_THREADS
    } while (error == EINTR && PyErr_CheckSignals() == 0);
    if (error) {
        errno = error;
        return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
    }
    PyObject *checksums = PyList_New(it->done);
    for (Py_ssize_t i = 0; checksums && i < it->done; i++) {
        PyObject *checksum = PyLong_FromUnsignedLongLong(it->batch.pages[i].checksum);
        if (checksum == NULL)
            Py_CLEAR(checksums);
        else
            PyList_SET_ITEM(checksums, i, checksum);
    }
    return checksums;
}

PyObject *native_send_pages(PyObject *module, PyObject *args) {
    Move it = {.batch = {.is_read = 0}};
    PyObject *tags, *pages, *checksums = NULL;
    if (!PyArg_ParseTuple(args, "iOOpd", &it.fd, &tags, &pages, &it.batch.hashes, &it.batch.deadline_s))
        return NULL;
    if (hold_pages(&it.batch, pages, tags) == 0)
        checksums = move_all(&it, send_some);
    native_let_go(&it.batch);
    return checksums;
}

PyObject *native_receive_pages(PyObject *module, PyObject *args) {
    Move it = {.batch = {.is_read = 1}};
    Py_buffer head;
    PyObject *tags, *pages, *checksums = NULL;
    if (!PyArg_ParseTuple(args, "iw*nOOpd", &it.fd, &head, &it.head_bytes, &tags, &pages, &it.batch.hashes,
                          &it.batch.deadline_s))
        return NULL;
    if (head.len != sizeof it.head || it.head_bytes < 0 || it.head_bytes > head.len) {
        PyErr_SetString(PyExc_ValueError, "a header of another length");
    } else if (hold_pages(&it.batch, pages, tags) == 0) {
        memcpy(&it.head, head.buf, head.len);
        checksums = move_all(&it, receive_some);
        if (it.expects)
            expect(it.fd, 1);
        memcpy(head.buf, &it.head, head.len);
    }
    native_let_go(&it.batch);
    PyBuffer_Release(&head);
    return checksums ? Py_BuildValue("Nn", checksums, it.head_bytes) : NULL;
}
