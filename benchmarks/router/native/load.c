// The load of load.py, compiled: see there for what is loaded and counted.
//
//     load PORT REQUESTS RESULT STREAMS SECONDS CHUNKS RAMP_S WARM_UP_S FINISH_S PIPELINED
//
// REQUESTS is a file of entries `LENGTH\n` and that many bytes: requests that the connections take turns with. Says
// `begin` and `end` on standard output when the window begins and ends. RESULT gets one line, `SECONDS REQUESTS
// ERRORS FIRSTS TIMES`, one line with the first error, and then FIRSTS and TIMES doubles: the milliseconds to the
// first byte, and those of each chunk from the worker to here. One thread.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "buffer.h"

enum { MAX_REQUESTS = 4096, EVENTS = 256, READ_BYTES = 262144, LONG_BYTES = 65536, STAMP_BYTES = 23 };

// Of an answer: its head, its body by length, or the parts of a body in chunks.
typedef enum { HEAD, BODY, SIZE, CHUNK, CHUNK_END, LAST_LINE } Part;

typedef struct {
    int fd, under_way, counts_first, status;
    Part part;
    size_t left;  // bytes of this part
    long chunks;
    uint64_t sent_ns;
    Buffer in, seen;  // not yet parsed; the end of the body so far, which may be the begin of a stamp
} Connection;

static struct {
    const char *bytes;
    size_t length;
} requests[MAX_REQUESTS];
static size_t longest;
static int request_count, is_counting, goes_on = 1;
static long sent_count, wanted_chunks, pipelined, done, errors, busy;  // busy: requests under way
static Buffer first_ms, chunk_ms;
static char first_error[256];

static void failed(Connection *one, const char *format, ...) {
    va_list words;
    va_start(words, format);
    if (!errors++) vsnprintf(first_error, sizeof first_error, format, words);
    va_end(words);
    if (one->fd >= 0) close(one->fd);
    one->fd = -1;
    busy -= one->under_way;
    one->under_way = 0;
}

static void read_requests(const char *path) {
    Buffer all = read_file(path);
    for (char *at = all.bytes; at < all.bytes + all.length && request_count < MAX_REQUESTS; request_count++) {
        requests[request_count].length = strtoul(at, &at, 10);
        requests[request_count].bytes = at + 1;
        if (requests[request_count].length > longest) longest = requests[request_count].length;
        at += 1 + requests[request_count].length;
    }
    if (!request_count) fail("requests");
}

static void send_next(Connection *one) {
    long number = sent_count++ % request_count;
    size_t sent = 0, length = requests[number].length;
    busy++;
    one->under_way++;
    one->counts_first = is_counting && pipelined == 1;
    one->sent_ns = now_ns();
    while (sent < length) {
        ssize_t got = send(one->fd, requests[number].bytes + sent, length - sent, MSG_NOSIGNAL);
        if (got < 0 && errno != EAGAIN) {
            failed(one, "a connection was closed: %s", strerror(errno));
            return;
        }
        if (got > 0) sent += got;
    }
}

// As many requests as are to be under way.
static void begin(Connection *one) {
    for (long i = 0; i < pipelined && one->fd >= 0; i++) send_next(one);
}

static void note(Buffer *times, uint64_t now, uint64_t since) {
    double milliseconds = ((double)now - (double)since) / 1e6;
    add(times, &milliseconds, sizeof milliseconds);
}

static void note_first(Connection *one, uint64_t now) {
    if (one->counts_first) note(&first_ms, now, one->sent_ns);
    one->counts_first = 0;
}

// A piece of the body, its coding removed.
static void take_body(Connection *one, const char *bytes, size_t length, uint64_t now) {
    if (!wanted_chunks) {
        note_first(one, now);
        return;
    }
    add(&one->seen, bytes, length);
    char *at = one->seen.bytes, *end = at + one->seen.length;
    for (char *stamp; (stamp = memmem(at, end - at, "\"T", 2)) && end - stamp >= STAMP_BYTES;) {
        at = stamp + 2;
        if (stamp[STAMP_BYTES - 1] != ';') continue;
        if (!one->chunks++) note_first(one, now);
        if (is_counting) note(&chunk_ms, now, strtoull(at, NULL, 10));
        at = stamp + STAMP_BYTES;
    }
    size_t kept = end - at < STAMP_BYTES ? end - at : STAMP_BYTES - 1;
    drop(&one->seen, one->seen.length - kept);
}

static void complete(Connection *one) {
    if (one->status != 200 || one->chunks != wanted_chunks) {
        failed(one, "status %d, %ld of %ld chunks", one->status, one->chunks, wanted_chunks);
        return;
    }
    if (is_counting) done++;
    busy--;
    one->under_way--;
    one->part = HEAD;
    one->chunks = one->seen.length = 0;
    if (goes_on) send_next(one);
}

// The head's end in the first bytes of `in`; NULL: it is not all there.
static char *take_head(Connection *one) {
    one->in.bytes[one->in.length] = 0;
    char *end = strstr(one->in.bytes, "\r\n\r\n");
    if (!end) return NULL;
    *end = 0;
    one->status = atoi(one->in.bytes + strcspn(one->in.bytes, " "));
    char *length = strcasestr(one->in.bytes, "\ncontent-length:");
    one->left = length ? strtoul(length + 16, NULL, 10) : 0;
    one->part = strcasestr(one->in.bytes, "\ntransfer-encoding:") ? SIZE : BODY;
    return end + 4;
}

// Takes what it can of what was received.
static void parse(Connection *one, uint64_t now) {
    char *at = one->in.bytes, *end = at + one->in.length;
    while (one->under_way) {
        size_t there = end - at;
        if (one->part == HEAD) {
            drop(&one->in, at - one->in.bytes);
            at = take_head(one);
            end = one->in.bytes + one->in.length;
            if (!at) return;
        } else if (one->part == BODY || one->part == CHUNK) {
            size_t taken = there < one->left ? there : one->left;
            if (taken) take_body(one, at, taken, now);
            at += taken;
            if ((one->left -= taken)) break;
            if (one->part == CHUNK)
                one->part = CHUNK_END;
            else
                complete(one);
        } else {  // a line, which ends a chunk, says the next one's size, or ends the answer
            char *line_end = memmem(at, there, "\r\n", 2);
            if (!line_end) break;
            Part part = one->part;
            if (part == SIZE) one->left = strtoul(at, NULL, 16);
            one->part = part == CHUNK_END ? SIZE : one->left ? CHUNK : LAST_LINE;
            at = line_end + 2;
            if (part == LAST_LINE) complete(one);
        }
    }
    drop(&one->in, at - one->in.bytes);
}

static void receive(Connection *one) {
    reserve(&one->in, READ_BYTES);
    ssize_t got = recv(one->fd, one->in.bytes + one->in.length, READ_BYTES, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        failed(one, "a connection was closed: %s", got ? strerror(errno) : "by the other end");
        return;
    }
    one->in.length += got;
    parse(one, now_ns());
}

static int connect_to(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1, room = 2 * longest;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    // a long request goes into the kernel at once; else this thread would wait for the one that reads it
    if (longest > LONG_BYTES) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    if (fd < 0 || connect(fd, (void *)&address, sizeof address)) fail("connect");
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void write_result(const char *path, double seconds) {
    FILE *file = fopen(path, "wb");
    if (!file) fail(path);
    size_t firsts = first_ms.length / sizeof(double), times = chunk_ms.length / sizeof(double);
    fprintf(file, "%.6f %ld %ld %zu %zu\n%s\n", seconds, done, errors, firsts, times, first_error);
    fwrite(first_ms.bytes, 1, first_ms.length, file);
    fwrite(chunk_ms.bytes, 1, chunk_ms.length, file);
    if (fclose(file)) fail(path);
}

int main(int count, char **words) {
    if (count != 11) return 2;
    int streams = atoi(words[4]);
    wanted_chunks = atol(words[6]);
    pipelined = atol(words[10]);
    uint64_t ramp_ns = 1e9 * atof(words[7]), begin_ns = ramp_ns + 1e9 * atof(words[8]);
    uint64_t end_ns = begin_ns + 1e9 * atof(words[5]), finish_ns = end_ns + 1e9 * atof(words[9]);
    read_requests(words[2]);
    int epoll = epoll_create1(0), begun = 0;
    Connection *all = calloc(streams, sizeof *all);
    if (!all) fail("memory");
    for (int i = 0; i < streams; i++) {
        all[i].fd = connect_to(atoi(words[1]));
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, all[i].fd, &event)) fail("epoll_ctl");
    }
    uint64_t since_ns = now_ns(), counted_ns = 0;
    while (goes_on || busy) {
        uint64_t spent_ns = now_ns() - since_ns;
        while (begun < streams && goes_on && spent_ns >= ramp_ns * begun / streams) begin(&all[begun++]);
        if (goes_on && !is_counting && spent_ns >= begin_ns) {
            is_counting = 1;
            counted_ns = now_ns();
            puts("begin");
            fflush(stdout);
        }
        if (goes_on && spent_ns >= end_ns) {
            is_counting = goes_on = 0;
            counted_ns = now_ns() - counted_ns;
            puts("end");
            fflush(stdout);
        }
        if (spent_ns >= finish_ns || !(goes_on || busy)) break;
        uint64_t next_ns = begun < streams   ? ramp_ns * begun / streams
                           : !goes_on        ? finish_ns
                           : is_counting     ? end_ns
                                             : begin_ns;
        if (begun < streams && !goes_on) next_ns = finish_ns;
        uint64_t left_ns = next_ns > spent_ns ? next_ns - spent_ns : 0;
        struct timespec pause = {left_ns / 1000000000, left_ns % 1000000000};
        struct epoll_event events[EVENTS];
        int ready = epoll_pwait2(epoll, events, EVENTS, &pause, NULL);
        if (ready < 0 && errno != EINTR) fail("epoll");
        for (int i = 0; i < ready; i++)
            if (((Connection *)events[i].data.ptr)->fd >= 0) receive(events[i].data.ptr);
    }
    for (int i = 0; i < streams; i++)
        if (all[i].under_way) failed(&all[i], "an answer did not come to its end");
    write_result(words[3], counted_ns / 1e9);
    return 0;
}
