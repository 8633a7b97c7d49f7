/* Sends requests over a socket and waits for their answers, and lets the interpreter go once for all of it. Python's socket
 * with a time-out polls and then sends, polls and then receives: four times.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <time.h>

#include "native.h"

#define LOOK_OUT_S 100e-6

typedef struct {
    int fd;
    const char *frame;
    Py_ssize_t left;           /* of the frame */
    unsigned char *into;
    Py_ssize_t room, received, counted; /* counted: bytes of whole frames, which begin with their length */
    Py_ssize_t frames;                  /* that are still to come; 0: any bytes are enough */
    int ended;                          /* the other end has closed */
    double deadline_s;
} Exchange;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

int native_left_ms(double deadline_s) {
    double left = (deadline_s - now_s()) * 1e3;
    return left <= 0 ? 0 : left >= 1e6 ? 1000000 : (int)ceil(left);
}

/* Whether nothing more is to be waited for. */
static int is_done(Exchange *it) {
    while (it->received - it->counted >= 4) {
        const unsigned char *at = it->into + it->counted;
        Py_ssize_t whole = 4 + (Py_ssize_t)(at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24);
        if (it->received - it->counted < whole)
            break;
        it->counted += whole;
        it->frames--;
    }
    return !it->left && (it->received == it->room || it->ended || (it->received && it->frames <= 0));
}

/* Look for the answer for a while before sleeping: a core that sleeps takes 50 us to wake, and most answers come within 60.
 * Whoever else wants this core gets it meanwhile.
 */
static void look_out(const Exchange *exchange) {
    double until_s = now_s() + LOOK_OUT_S;
    char byte;
    while (recv(exchange->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && errno == EAGAIN && now_s() < until_s)
        sched_yield();
}

/* Returns 0, or an error of errno; ETIMEDOUT at the deadline. EINTR: to be called again. */
static int step_on(Exchange *exchange) {
    while (!is_done(exchange)) {
        struct pollfd ready = {exchange->fd, exchange->left ? POLLOUT : POLLIN, 0};
        int wait_ms = native_left_ms(exchange->deadline_s);
        if (wait_ms == 0)
            return ETIMEDOUT;
        if (poll(&ready, 1, wait_ms) < 0)
            return errno;
        if (ready.revents == 0)
            continue;
        ssize_t done = exchange->left ? send(exchange->fd, exchange->frame, exchange->left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                      : recv(exchange->fd, exchange->into + exchange->received,
                                             exchange->room - exchange->received, MSG_DONTWAIT);
        if (done < 0 && errno != EAGAIN)
            return errno;
        if (done >= 0 && exchange->left)
            exchange->frame += done, exchange->left -= done;
        else if (done >= 0)
            exchange->received += done, exchange->ended = done == 0;
    }
    return 0;
}

PyObject *native_exchange(PyObject *module, PyObject *args) {
    Py_buffer frame;
    Exchange it = {.received = 0};
    if (!PyArg_ParseTuple(args, "iy*nnd", &it.fd, &frame, &it.room, &it.frames, &it.deadline_s))
        return NULL;
    it.frame = frame.buf, it.left = frame.len;
    PyObject *answer = PyBytes_FromStringAndSize(NULL, it.room);
    int error = answer == NULL ? ENOMEM : 0;
    if (!error) {
        it.into = (unsigned char *)PyBytes_AS_STRING(answer);
        /* A frame mostly fits into the socket's buffer: nobody needs to wait for that. */
        int may_send = it.left && native_left_ms(it.deadline_s);
        ssize_t sent = may_send ? send(it.fd, it.frame, it.left, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
        if (sent > 0)
            it.frame += sent, it.left -= sent;
        else if (sent < 0 && errno != EAGAIN && errno != EINTR)
            error = errno;
    }
    int looks_out = it.frames > 0;
    while (!error && !is_done(&it)) {
        Py_BEGIN_ALLOW_THREADS
        if (looks_out)
            look_out(&it);
        looks_out = 0;
        error = step_on(&it);
        Py_END_ALLOW_THREADS
        if (error == EINTR && PyErr_CheckSignals() == 0)
            error = 0;
    }
    if (error && it.received && !PyErr_Occurred())
        error = 0; /* what came before is told first; the next call finds the error again */
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
