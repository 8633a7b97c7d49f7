/* Sends a request over a socket and waits for the answer, and lets the interpreter go once for both. Python's socket
 * with a time-out polls and then sends, polls and then receives: four times.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include "native.h"

typedef struct {
    int fd;
    const char *frame;
    Py_ssize_t left;           /* of the frame */
    char *into;
    Py_ssize_t room, received; /* received: -1 until there is something, 0: the other end has closed */
    double deadline_s;
} Exchange;

/* Milliseconds to wait, at most; 0 or less: the deadline has passed. */
static int left_ms(double deadline_s) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double left = (deadline_s - now.tv_sec - now.tv_nsec * 1e-9) * 1e3;
    return left <= 0 ? 0 : left >= 1e6 ? 1000000 : (int)ceil(left);
}

/* Returns 0, or an error of errno; ETIMEDOUT at the deadline. EINTR: to be called again. */
static int step_on(Exchange *exchange) {
    while (exchange->left || (exchange->room && exchange->received < 0)) {
        struct pollfd ready = {exchange->fd, exchange->left ? POLLOUT : POLLIN, 0};
        int wait_ms = left_ms(exchange->deadline_s);
        if (wait_ms == 0)
            return ETIMEDOUT;
        if (poll(&ready, 1, wait_ms) < 0)
            return errno;
        if (ready.revents == 0)
            continue;
        ssize_t done = exchange->left ? send(exchange->fd, exchange->frame, exchange->left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                      : recv(exchange->fd, exchange->into, exchange->room, MSG_DONTWAIT);
        if (done < 0 && errno != EAGAIN)
            return errno;
        if (done >= 0 && exchange->left)
            exchange->frame += done, exchange->left -= done;
        else if (done >= 0)
            exchange->received = done;
    }
    return 0;
}

PyObject *native_exchange(PyObject *module, PyObject *args) {
    Py_buffer frame;
    Exchange it = {.received = -1};
    if (!PyArg_ParseTuple(args, "iy*nd", &it.fd, &frame, &it.room, &it.deadline_s))
        return NULL;
    it.frame = frame.buf, it.left = frame.len;
    PyObject *answer = PyBytes_FromStringAndSize(NULL, it.room);
    int error = answer == NULL ? ENOMEM : 0;
    if (!error) {
        it.into = PyBytes_AS_STRING(answer);
        /* A frame mostly fits into the socket's buffer: nobody needs to wait for that. */
        ssize_t sent = left_ms(it.deadline_s) == 0 ? 0 : send(it.fd, it.frame, it.left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0)
            it.frame += sent, it.left -= sent;
        else if (sent < 0 && errno != EAGAIN && errno != EINTR)
            error = errno;
    }
    while (!error && (it.left || (it.room && it.received < 0))) {
        Py_BEGIN_ALLOW_THREADS
        error = step_on(&it);
        Py_END_ALLOW_THREADS
        if (error == EINTR && PyErr_CheckSignals() == 0)
            error = 0;
    }
    PyBuffer_Release(&frame);
    if (error && !PyErr_Occurred()) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    if (error)
        Py_CLEAR(answer);
    else if (it.room)
        _PyBytes_Resize(&answer, it.received);
    return answer;
}
