// The mock worker of mock.py, compiled: it answers at once, so that the router in front of it is what is measured.
//
//     worker PORT ANSWERS ROLE [NAME]
//
// NAME: of a socket in the abstract namespace, on which it listens too (host_socket.py).
// ANSWERS is a file of entries `NAME LENGTH\n` and that many bytes. A name is a path, whose whole answer the bytes
// are, or one of: `answer` (to any other POST), `other` (to any other GET), and of streams `head`, `before` and
// `after` the time in an event, `end`. One thread; it ends when its standard input does.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stddef.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "buffer.h"

enum { MAX_ENTRIES = 64, EVENTS = 256, READ_BYTES = 65536 };

typedef struct {
    char name[64];
    const char *bytes;
    size_t length;
} Entry;

typedef struct {
    int fd, is_full;
    Buffer in, out;
    long left;  // chunks of the stream that are still to be sent
    uint64_t pause_ns, due_ns;
    long place;  // in the heap; -1: not there
} Connection;

static Entry entries[MAX_ENTRIES];
static int entry_count, epoll, is_prefill;
static Connection **heap;  // streams by the time of their next chunk
static long heap_length, heap_room;

static void read_entries(const char *path) {
    Buffer all = read_file(path);
    for (char *at = all.bytes; at < all.bytes + all.length && entry_count < MAX_ENTRIES;) {
        Entry *entry = &entries[entry_count++];
        int used = 0;
        if (sscanf(at, "%63s %zu%n", entry->name, &entry->length, &used) != 2) fail("answers");
        entry->bytes = at + used + 1;
        at += used + 1 + entry->length;
    }
}

static const Entry *entry_of(const char *name, size_t length) {
    for (int i = 0; i < entry_count; i++)
        if (strlen(entries[i].name) == length && !memcmp(entries[i].name, name, length)) return &entries[i];
    return NULL;
}

static void say(Connection *to, const char *name) {
    const Entry *entry = entry_of(name, strlen(name));
    if (entry) add(&to->out, entry->bytes, entry->length);
}

// --- the heap

static void put(long place, Connection *one) {
    heap[place] = one;
    one->place = place;
}

static void sift(long place) {
    Connection *one = heap[place];
    while (place && heap[(place - 1) / 2]->due_ns > one->due_ns) {
        put(place, heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (long child; (child = 2 * place + 1) < heap_length; place = child) {
        if (child + 1 < heap_length && heap[child + 1]->due_ns < heap[child]->due_ns) child++;
        if (heap[child]->due_ns >= one->due_ns) break;
        put(place, heap[child]);
    }
    put(place, one);
}

static void enter(Connection *one) {
    if (one->place >= 0) return;
    if (heap_length == heap_room) heap = realloc(heap, (heap_room = 2 * heap_room + 1024) * sizeof *heap);
    if (!heap) fail("memory");
    put(heap_length++, one);
    sift(one->place);
}

static void leave(Connection *one) {
    long place = one->place;
    if (place < 0) return;
    one->place = -1;
    Connection *last = heap[--heap_length];
    if (last == one) return;
    put(place, last);
    sift(place);
}

// --- a connection

static void watch(Connection *one, int operation) {
    struct epoll_event event = {.events = EPOLLIN | (one->is_full ? EPOLLOUT : 0), .data.ptr = one};
    if (epoll_ctl(epoll, operation, one->fd, &event)) fail("epoll_ctl");
}

static int send_out(Connection *one) {
    while (one->out.length) {
        ssize_t sent = send(one->fd, one->out.bytes, one->out.length, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return 0;
        if (sent < 0) break;
        drop(&one->out, sent);
    }
    int is_full = one->out.length > 0;
    if (is_full != one->is_full) {
        one->is_full = is_full;
        watch(one, EPOLL_CTL_MOD);
    }
    return 1;
}

static void say_chunk(Connection *to) {
    const Entry *before = entry_of("before", 6), *after = entry_of("after", 5);
    char head[32], stamp[24];
    int digits = sprintf(stamp, "%020llu", (unsigned long long)now_ns());
    add(&to->out, head, sprintf(head, "%zx\r\n", before->length + digits + after->length));
    add(&to->out, before->bytes, before->length);
    add(&to->out, stamp, digits);
    add(&to->out, after->bytes, after->length);
    add(&to->out, "\r\n", 2);
    if (!--to->left) say(to, "end");
}

// The number of a member of the request's JSON. These names and numbers come from a load that writes them plainly.
static long number_of(const char *body, size_t length, const char *name, long otherwise) {
    const char *found = memmem(body, length, name, strlen(name));
    return found ? atol(found + strlen(name) + strspn(found + strlen(name), ": ")) : otherwise;
}

static int is_true(const char *body, size_t length, const char *name) {
    const char *found = memmem(body, length, name, strlen(name));
    return found && found[strlen(name) + strspn(found + strlen(name), ": ")] == 't';
}

static void answer(Connection *to, const char *head, const char *body, size_t length) {
    int is_post = !memcmp(head, "POST ", 5);
    const char *space = strchr(head, ' ');  // there is none in the second part of HTTP/2's greeting
    const char *path = space ? space + 1 : "";
    const Entry *whole = entry_of(path, strcspn(path, " ?\r"));
    if (whole) {
        add(&to->out, whole->bytes, whole->length);
    } else if (!is_post || !is_true(body, length, "\"stream\"")) {
        say(to, is_post ? "answer" : "other");
    } else {
        long tokens = number_of(body, length, "\"max_completion_tokens\"", 1);
        to->left = is_prefill ? 1 : number_of(body, length, "\"max_tokens\"", tokens);
        to->pause_ns = 1000 * number_of(body, length, "\"seed\"", 0);
        to->due_ns = now_ns() + to->pause_ns;
        say(to, "head");
        say_chunk(to);
        if (to->left) enter(to);
    }
}

static const char *header(const char *head, const char *name) {
    for (const char *line = strchr(head, '\n'); line; line = strchr(line, '\n'))
        if (!strncasecmp(++line, name, strlen(name))) return line + strlen(name);
    return NULL;
}

// Removes the chunked coding in place. Returns where the body ends in what was received; NULL: it is not all there.
static char *join_chunks(char *body, size_t *length) {
    char *from = body, *to = body;
    for (;;) {
        char *line_end = strstr(from, "\r\n");
        if (!line_end) return NULL;
        size_t size = strtoul(from, NULL, 16);
        from = line_end + 2;
        if (strlen(from) < size + 2) return NULL;
        memmove(to, from, size);
        to += size;
        from += size + 2;
        if (!size) break;
    }
    *length = to - body;
    return from;
}

// Answers the first request in `in`, once it is whole. Returns its length there; 0: more must come.
static size_t take_request(Connection *from) {
    char *head = from->in.bytes, *end;
    head[from->in.length] = 0;
    char *body = strstr(head, "\r\n\r\n");
    if (!body) return 0;
    *(body + 2) = 0;  // the headers end here
    body += 4;
    const char *said = header(head, "content-length:");
    size_t length = said ? strtoul(said, NULL, 10) : 0, there = from->in.bytes + from->in.length - body;
    end = body + length;
    if (header(head, "transfer-encoding:")) {
        char *copy = strndup(body, there);
        end = join_chunks(copy, &length);
        if (end) {
            answer(from, head, copy, length);
            end = body + (end - copy);
        }
        free(copy);
    } else if (there < length) {
        end = NULL;
    } else {
        answer(from, head, body, length);
    }
    if (!end) *(body - 2) = '\r';
    return end ? (size_t)(end - from->in.bytes) : 0;
}

static int receive(Connection *from) {
    reserve(&from->in, READ_BYTES);
    ssize_t got = recv(from->fd, from->in.bytes + from->in.length, READ_BYTES, 0);
    if (got <= 0) return got < 0 && errno == EAGAIN;
    from->in.length += got;
    return 1;
}

static int serve(Connection *one) {
    for (size_t used; !one->left && one->in.length && (used = take_request(one));) drop(&one->in, used);
    return send_out(one);
}

static void end_connection(Connection *one) {
    leave(one);
    close(one->fd);
    free(one->in.bytes);
    free(one->out.bytes);
    free(one);
}

static void accept_all(int listening) {
    for (int fd, on = 1; (fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        Connection *one = calloc(1, sizeof *one);
        if (!one) fail("memory");
        *one = (Connection){.fd = fd, .place = -1};
        watch(one, EPOLL_CTL_ADD);
    }
}

// Sends the chunks that are due; a stream without a pause gets one in each turn. A client that does not read waits.
static void send_due(void) {
    uint64_t turn_ns = now_ns();
    while (heap_length && heap[0]->due_ns <= turn_ns) {
        Connection *one = heap[0];
        if (one->is_full) {
            leave(one);
            continue;
        }
        say_chunk(one);
        one->due_ns = one->pause_ns ? one->due_ns + one->pause_ns : turn_ns + 1;
        if (one->left)
            sift(0);
        else
            leave(one);
        if (!serve(one)) end_connection(one);
    }
}

static int listen_on(int family, const void *address, socklen_t length) {
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, address, length) || listen(fd, 4096)) fail("listen");
    return fd;
}

static int listen_on_port(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return listen_on(AF_INET, &address, sizeof address);
}

static int listen_on_name(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path + 1, name, sizeof address.sun_path - 2);  // behind a zero: the abstract namespace
    return listen_on(AF_UNIX, &address, offsetof(struct sockaddr_un, sun_path) + 1 + strlen(address.sun_path + 1));
}

int main(int count, char **words) {
    if (count != 4 && count != 5) return 2;
    read_entries(words[2]);
    is_prefill = !strcmp(words[3], "prefill");
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1000);
    epoll = epoll_create1(0);
    Connection standard_input = {.fd = 0}, listeners[2] = {{.fd = listen_on_port(atoi(words[1]))}};
    watch(&standard_input, EPOLL_CTL_ADD);
    watch(&listeners[0], EPOLL_CTL_ADD);
    if (count == 5) {
        listeners[1].fd = listen_on_name(words[4]);
        watch(&listeners[1], EPOLL_CTL_ADD);
    }
    for (;;) {
        uint64_t now = now_ns(), left_ns = heap_length && heap[0]->due_ns > now ? heap[0]->due_ns - now : 0;
        struct timespec pause = {left_ns / 1000000000, left_ns % 1000000000};
        struct epoll_event events[EVENTS];
        int ready = epoll_pwait2(epoll, events, EVENTS, heap_length ? &pause : NULL, NULL);
        if (ready < 0 && errno != EINTR) fail("epoll");
        for (int i = 0; i < ready; i++) {
            Connection *one = events[i].data.ptr;
            char dropped[4096];
            if (one == &listeners[0] || one == &listeners[1]) {
                accept_all(one->fd);
            } else if (one == &standard_input) {
                if (read(0, dropped, sizeof dropped) <= 0) return 0;
            } else if (((events[i].events & ~EPOLLOUT) && !receive(one)) || !serve(one)) {
                end_connection(one);
            } else if (one->left && !one->is_full) {
                enter(one);
            }
        }
        send_due();
    }
}
