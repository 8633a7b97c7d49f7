/* Copies the pages of a batch to or from a mapped arena, hashes them on the way, and lets the interpreter go once.
 *
 * Each 64 bytes are loaded once: they are stored, past the cache where the target is large and aligned, and mixed
 * into the checksum from the same register. So what is hashed is what was stored, whoever writes the source
 * meanwhile.
 *
 * The checksum is XXH3-64 of inputs of more than 240 bytes, after its specification (xxHash, doc/xxhash_spec.md),
 * whose names the constants have. Shorter pages go by another rule there, and by Python here (copying.py).
 *
 * A copy is bounded three times: the page must lie inside the arena's mapping, its row inside the table, and the
 * caller's segments are Python buffers, which are held until the call returns. All of it is checked before the
 * first byte moves.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>
#include <time.h>

#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pages and their checksums are little-endian"
#endif

enum { STRIPE = 64, BLOCK_STRIPES = 16 };
enum { CACHED_MOST = 8 << 20 };    /* of a batch: what is longer goes past the cache */
enum { ROW_BYTES = 96, SEQUENCE_AT = 56, STATE_AT = 80, COMMITTED = 2 }; /* ROW_DTYPE of protocol/slot_table.py */
enum { OK, LOST, CORRUPT };        /* PageOutcome of transports/base.py */

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u

static const uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

typedef struct {
    uint64_t acc[8];
    uint64_t left;             /* stripes that are still to be accumulated; the last one is not among them */
    unsigned index;            /* of the next stripe in its block */
    unsigned carried;          /* bytes in `carry`: a stripe that two segments share */
    unsigned char carry[STRIPE], last[STRIPE];
    uint64_t length;
} Hash;

static void hash_begin(Hash *h, uint64_t length) {
    const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(h->acc, start, sizeof start);
    h->left = (length - 1) / STRIPE;
    h->index = h->carried = 0;
    h->length = length;
}

static inline uint64_t word(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

static void accumulate(uint64_t *acc, const unsigned char *data, const unsigned char *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t value = word(data + 8 * i), key = value ^ word(secret + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

static void scramble(uint64_t *acc) {
    for (int i = 0; i < 8; i++)
        acc[i] = (acc[i] ^ acc[i] >> 47 ^ SECRET[16 + i]) * P32_1;
}

/* Copy `count` stripes (not where `to` is NULL) and accumulate them (not where `acc` is NULL). */
typedef void Stripes(uint64_t *acc, unsigned index, unsigned char *to, const unsigned char *from, size_t count,
                     int stream);

static void plain_stripes(uint64_t *acc, unsigned index, unsigned char *to, const unsigned char *from, size_t count,
                          int stream) {
    (void)stream;
    if (acc == NULL) {
        memcpy(to, from, count * STRIPE);
        return;
    }
    for (; count--; from += STRIPE) {
        unsigned char data[STRIPE];
        memcpy(data, from, STRIPE);
        memcpy(to, data, STRIPE);
        to += STRIPE;
        accumulate(acc, data, (const unsigned char *)(SECRET + index));
        if (++index == BLOCK_STRIPES) {
            scramble(acc);
            index = 0;
        }
    }
}

#if defined(__x86_64__)
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))

__attribute__((target("avx2"))) static inline __m256i mixed(__m256i acc, __m256i data, const uint64_t *secret) {
    __m256i key = _mm256_xor_si256(data, LOAD(secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4E)));
}

__attribute__((target("avx2"))) static inline __m256i scrambled(__m256i acc, const uint64_t *secret) {
    const __m256i prime = _mm256_set1_epi64x(P32_1);
    acc = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), LOAD(secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static void avx2_stripes(uint64_t *acc, unsigned index, unsigned char *to,
                                                         const unsigned char *from, size_t count, int stream) {
    const int hashes = acc != NULL;
    __m256i first = hashes ? LOAD(acc) : _mm256_setzero_si256();
    __m256i second = hashes ? LOAD(acc + 4) : _mm256_setzero_si256();
    while (count) {
        size_t some = BLOCK_STRIPES - index < count ? BLOCK_STRIPES - index : count;
        for (size_t i = 0; i < some; i++, from += STRIPE, to += STRIPE) {
            __m256i low = LOAD(from), high = LOAD(from + 32);
            _mm_prefetch((const char *)from + 256, _MM_HINT_T0);
            if (stream) {
                _mm256_stream_si256((__m256i *)to, low);
                _mm256_stream_si256((__m256i *)(to + 32), high);
            } else {
                _mm256_storeu_si256((__m256i *)to, low);
                _mm256_storeu_si256((__m256i *)(to + 32), high);
            }
            if (hashes) {
                first = mixed(first, low, SECRET + index + i);
                second = mixed(second, high, SECRET + index + i + 4);
            }
        }
        count -= some;
        index += some;
        if (index == BLOCK_STRIPES) {
            first = scrambled(first, SECRET + 16);
            second = scrambled(second, SECRET + 20);
            index = 0;
        }
    }
    if (hashes) {
        _mm256_storeu_si256((__m256i *)acc, first);
        _mm256_storeu_si256((__m256i *)(acc + 4), second);
    }
}
#endif

static Stripes *stripes = plain_stripes;

/* Accumulate a stripe that lies in `h->carry`, unless it is the last of the page. */
static void take_carried(Hash *h) {
    memcpy(h->last, h->carry, STRIPE);
    h->carried = 0;
    if (h->left == 0)
        return;
    h->left--;
    accumulate(h->acc, h->carry, (const unsigned char *)(SECRET + h->index));
    if (++h->index == BLOCK_STRIPES) {
        scramble(h->acc);
        h->index = 0;
    }
}

static size_t carry(Hash *h, unsigned char *to, const unsigned char *from, size_t length) {
    size_t taken = STRIPE - h->carried < length ? STRIPE - h->carried : length;
    memcpy(h->carry + h->carried, from, taken);
    memcpy(to, h->carry + h->carried, taken);
    h->carried += taken;
    if (h->carried == STRIPE)
        take_carried(h);
    return taken;
}

/* Copy a segment, and hash it where `h` is not NULL. `stream`: past the cache, if it is aligned. */
static void move(Hash *h, unsigned char *to, const unsigned char *from, size_t length, int stream) {
    if (h == NULL) {
        size_t whole = stream && (uintptr_t)to % 32 == 0 ? length / STRIPE : 0;
        if (whole)
            stripes(NULL, 0, to, from, whole, stream);
        memcpy(to + whole * STRIPE, from + whole * STRIPE, length - whole * STRIPE);
        return;
    }
    if (h->carried) {
        size_t taken = carry(h, to, from, length);
        to += taken, from += taken, length -= taken;
    }
    size_t whole = length / STRIPE < h->left ? length / STRIPE : h->left;
    if (whole) {
        stripes(h->acc, h->index, to, from, whole, stream && (uintptr_t)to % 32 == 0);
        h->index = (h->index + whole) % BLOCK_STRIPES;
        h->left -= whole;
        to += whole * STRIPE, from += whole * STRIPE, length -= whole * STRIPE;
        memcpy(h->last, to - STRIPE, STRIPE);
    }
    while (length) {
        size_t taken = carry(h, to, from, length);
        to += taken, from += taken, length -= taken;
    }
}

static uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash_end(Hash *h) {
    const unsigned char *secret = (const unsigned char *)SECRET;
    unsigned char tail[STRIPE]; /* the last 64 bytes of the page */
    memcpy(tail, h->last + h->carried, STRIPE - h->carried);
    memcpy(tail + STRIPE - h->carried, h->carry, h->carried);
    accumulate(h->acc, tail, secret + sizeof SECRET - STRIPE - 7);
    uint64_t value = h->length * P64_1;
    for (int i = 0; i < 8; i += 2)
        value += folded(h->acc[i] ^ word(secret + 11 + 8 * i), h->acc[i + 1] ^ word(secret + 19 + 8 * i));
    value = (value ^ value >> 37) * 0x165667919E3779F9u;
    value ^= value >> 32;
    return value ? value : 1; /* 0 says that there is none */
}

uint64_t native_checksum(const Batch *batch, const Page *page) {
    Hash hash;
    unsigned char copy[4096]; /* stays in the first cache: the source is not ours to write */
    hash_begin(&hash, page->length);
    for (Py_ssize_t k = page->first; k < page->first + page->count; k++) {
        const unsigned char *from = batch->segments[k].buf;
        for (size_t left = batch->segments[k].len, piece; left; from += piece, left -= piece) {
            piece = left < sizeof copy ? left : sizeof copy;
            move(&hash, copy, from, piece, 0);
        }
    }
    return hash_end(&hash);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

/* Whether the slot still holds the page that was asked for. After its bytes: a refill in between shows. */
static int still_holds(const Page *page) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    uint64_t state = __atomic_load_n((const uint64_t *)(page->row + STATE_AT), __ATOMIC_ACQUIRE);
    uint64_t sequence = __atomic_load_n((const uint64_t *)(page->row + SEQUENCE_AT), __ATOMIC_ACQUIRE);
    return state == COMMITTED && sequence == page->sequence;
}

static void move_pages(Batch *batch) {
    uint64_t length = batch->count ? batch->pages[0].length : 0; /* they are cut alike */
    int stream = batch->count * length > CACHED_MOST;
    for (Py_ssize_t i = 0; i < batch->count; i++) {
        Page *page = batch->pages + i;
        if ((batch->is_late = now_s() >= batch->deadline_s))
            break;
        Hash hash, *h = batch->hashes && (page->checksum || !batch->is_read) ? &hash : NULL;
        if (h)
            hash_begin(h, page->length);
        unsigned char *slot = page->slot;
        for (Py_ssize_t k = page->first; k < page->first + page->count; k++) {
            Py_buffer *segment = batch->segments + k;
            if (batch->is_read)
                move(h, segment->buf, slot, segment->len, stream);
            else
                move(h, slot, segment->buf, segment->len, stream);
            slot += segment->len;
        }
        uint64_t checksum = h ? hash_end(h) : page->checksum;
        if (!batch->is_read)
            page->checksum = checksum;
        else
            page->outcome = !still_holds(page) ? LOST : checksum == page->checksum ? OK : CORRUPT;
    }
#if defined(__x86_64__)
    _mm_sfence(); /* stores past the cache are there before anybody is told */
#endif
}

/* --- Python's side: what a call works with */

int native_hold(Batch *batch, Page *page, PyObject *segments) {
    PyObject *fast = PySequence_Fast(segments, "a page is a sequence of buffers");
    if (fast == NULL)
        return -1;
    page->first = batch->held;
    page->count = PySequence_Fast_GET_SIZE(fast);
    int failed = 0;
    if (batch->held + page->count > batch->room) {
        Py_ssize_t room = 2 * (batch->held + page->count);
        Py_buffer *more = PyMem_Realloc(batch->segments, room * sizeof *more);
        if ((failed = more == NULL))
            PyErr_NoMemory();
        else
            batch->segments = more, batch->room = room;
    }
    for (Py_ssize_t k = 0; !failed && k < page->count; k++) {
        Py_buffer *view = batch->segments + batch->held;
        int flags = batch->is_read ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        failed = PyObject_GetBuffer(PySequence_Fast_GET_ITEM(fast, k), view, flags) < 0;
        if (!failed) {
            batch->held++;
            page->length += view->len;
        }
    }
    Py_DECREF(fast);
    return failed ? -1 : 0;
}

/* The i-th number of a list that has `count` of them. */
static uint64_t number(PyObject *list, Py_ssize_t i) {
    return PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, i));
}

static int place_pages(Batch *batch, PyObject *pages, PyObject *const *columns, int count, uint64_t rows_at) {
    PyObject *fast = PySequence_Fast(pages, "pages are a sequence");
    if (fast == NULL)
        return -1;
    batch->count = PySequence_Fast_GET_SIZE(fast);
    int failed = 0;
    for (int k = 0; k < count; k++)
        failed |= !PyList_Check(columns[k]) || PyList_GET_SIZE(columns[k]) != batch->count;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "a list that is not one number a page");
    else if ((failed = (batch->pages = PyMem_Calloc(batch->count + 1, sizeof *batch->pages)) == NULL))
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; !failed && i < batch->count; i++) {
        Page *page = batch->pages + i;
        if ((failed = native_hold(batch, page, PySequence_Fast_GET_ITEM(fast, i)) < 0))
            break;
        uint64_t offset = number(columns[0], i), size = batch->arena.len, slot = 0;
        if (batch->is_read) {
            page->checksum = number(columns[1], i);
            slot = number(columns[2], i);
            page->sequence = number(columns[3], i);
        }
        if ((failed = PyErr_Occurred() != NULL))
            break;
        uint64_t rows = (uint64_t)batch->table.len > rows_at ? (batch->table.len - rows_at) / ROW_BYTES : 0;
        if (page->length > size || offset > size - page->length || (batch->is_read && slot >= rows)) {
            PyErr_Format(PyExc_IndexError, "page %zd is outside of the memory", i);
            failed = 1;
        } else if (batch->hashes && page->length < LEAST_HASHED) {
            PyErr_SetString(PyExc_ValueError, "a page too short to be hashed here");
            failed = 1;
        } else {
            page->slot = (unsigned char *)batch->arena.buf + offset;
            page->row = batch->is_read ? (const unsigned char *)batch->table.buf + rows_at + slot * ROW_BYTES : NULL;
        }
    }
    Py_DECREF(fast);
    return failed ? -1 : 0;
}

void native_let_go(Batch *batch) {
    for (Py_ssize_t k = 0; k < batch->held; k++)
        PyBuffer_Release(batch->segments + k);
    PyMem_Free(batch->segments);
    PyMem_Free(batch->pages);
    PyBuffer_Release(&batch->arena); /* nothing, where there is none */
    PyBuffer_Release(&batch->table);
}

static int run(Batch *batch) {
    Py_BEGIN_ALLOW_THREADS
    move_pages(batch);
    Py_END_ALLOW_THREADS
    if (batch->is_late)
        PyErr_SetString(PyExc_TimeoutError, "the deadline passed while pages were copied");
    return batch->is_late ? -1 : 0;
}

PyObject *native_read(PyObject *module, PyObject *args) {
    Batch batch = {.is_read = 1};
    PyObject *columns[4], *pages, *result = NULL;
    unsigned long long rows_at;
    if (!PyArg_ParseTuple(args, "y*y*KOOOOOpd", &batch.arena, &batch.table, &rows_at, &columns[0], &columns[1],
                          &columns[2], &columns[3], &pages, &batch.hashes, &batch.deadline_s))
        return NULL;
    if (place_pages(&batch, pages, columns, 4, rows_at) == 0 && run(&batch) == 0)
        result = PyList_New(batch.count);
    for (Py_ssize_t i = 0; result && i < batch.count; i++)
        PyList_SET_ITEM(result, i, PyLong_FromLong(batch.pages[i].outcome));
    native_let_go(&batch);
    return result;
}

PyObject *native_write(PyObject *module, PyObject *args) {
    Batch batch = {.is_read = 0};
    PyObject *columns[4] = {NULL}, *pages, *result = NULL;
    if (!PyArg_ParseTuple(args, "w*OOpd", &batch.arena, &columns[0], &pages, &batch.hashes, &batch.deadline_s))
        return NULL;
    if (place_pages(&batch, pages, columns, 1, 0) == 0 && run(&batch) == 0)
        result = PyList_New(batch.count);
    for (Py_ssize_t i = 0; result && i < batch.count; i++) {
        PyObject *checksum = PyLong_FromUnsignedLongLong(batch.pages[i].checksum);
        if (checksum == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, i, checksum);
    }
    native_let_go(&batch);
    return result;
}

void native_choose_copier(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        stripes = avx2_stripes;
#endif
}
