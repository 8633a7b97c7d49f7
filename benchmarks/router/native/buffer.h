// Bytes that grow at their end and are used up from their begin, and the clock of all instruments.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    char *bytes;
    size_t length, room;
} Buffer;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

// Makes room for `more` bytes, and for a zero behind them.
static void reserve(Buffer *buffer, size_t more) {
    if (buffer->length + more + 1 <= buffer->room) return;
    buffer->room = 2 * (buffer->length + more) + 4096;
    buffer->bytes = realloc(buffer->bytes, buffer->room);
    if (!buffer->bytes) fail("memory");
}

static void add(Buffer *buffer, const void *bytes, size_t length) {
    reserve(buffer, length);
    memcpy(buffer->bytes + buffer->length, bytes, length);
    buffer->length += length;
}

// Forgets the first bytes.
static void drop(Buffer *buffer, size_t length) {
    buffer->length -= length;
    memmove(buffer->bytes, buffer->bytes + length, buffer->length);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// The file's bytes, with a zero behind them.
static Buffer read_file(const char *path) {
    Buffer all = {0};
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    for (;;) {
        reserve(&all, 65536);
        size_t got = fread(all.bytes + all.length, 1, 65536, file);
        all.length += got;
        if (!got) break;
    }
    fclose(file);
    all.bytes[all.length] = 0;
    return all;
}
