/* Two ranks of one host tell each other a few integers a step, through one shared page.
 *
 * Every block begins on 128 bytes of its own, so that the adjacent-line prefetcher couples no ranks:
 *   header | error | owner[2] | bell[2] | slot[channel][rank][2]
 * Header and error keep their place and shape in every ABI: by them two ends of unequal ABI tell each other.
 *
 * A rank fills its slot n & 1 and stores the slot's sequence last; the peer spins on that one line. Two slots
 * suffice: n overwrites n - 2 only after its writer has taken the peer's n - 1, which the peer published only
 * after it had taken n - 2. The bell changes with each publication of any channel: sleepers wait on it. A
 * publisher makes the system call only where the peer has said that it sleeps for that channel (`wanted`).
 *
 * The page's name is gone as soon as both ranks have it mapped: whatever is killed later, nothing remains.
 */
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifndef XC_ABI_VERSION
#define XC_ABI_VERSION 2
#endif
#define XC_PREFIX "/engine-dp2-"
#define XC_MAGIC 0x31326b6e61723264ull
#define XC_CHANNELS 2
#define XC_WORDS 7
#define XC_PAGE 4096
#define XC_SESSION 49
#define XC_POISON 1u

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "atomics would need a lock");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the layout is little-endian");

typedef enum {
    XC_OK,
    XC_ABI,
    XC_GEOMETRY,
    XC_SESSION_ID,
    XC_OWNER_CONFLICT,
    XC_FORKED,
    XC_TIMEOUT,
    XC_PEER_DEAD,
    XC_PEER_REPLACED,
    XC_SEQ_DIVERGED,
    XC_CLOSED,
    XC_SYSCALL,
} xc_code;

enum { XC_ABSENT, XC_CLAIMED, XC_ATTACHED, XC_LEFT };

typedef struct {
    _Alignas(128) uint64_t magic;
    uint32_t abi, header_bytes, total_bytes, world, channels, words[XC_CHANNELS];
    uint64_t pid_namespace;
    char session[XC_SESSION];
    _Atomic uint32_t ready;
} xc_header;

/* word: code | rank << 8 | channel << 16 | errno << 24, set once by whoever fails first. */
typedef struct {
    _Alignas(128) _Atomic uint64_t word;
    _Atomic uint64_t seq[2];
} xc_error;

typedef struct {
    _Alignas(128) _Atomic uint32_t state;
    _Atomic int32_t pid;
    _Atomic uint64_t start_ticks;
} xc_owner;

/* rung: bit 0 poison, above it a count. wanted: a bit a channel, written by the peer, on a line of its own. */
typedef struct {
    _Alignas(128) _Atomic uint32_t rung;
    char apart[60];
    _Atomic uint32_t wanted;
} xc_bell;

/* seq is the epoch + 1; the arrival is on the next line, which nobody reads in the exchange itself. */
typedef struct {
    _Alignas(128) _Atomic uint64_t seq;
    _Atomic int64_t words[XC_WORDS];
    _Atomic int64_t arrival_ns;
} xc_slot;

typedef struct {
    xc_header header;
    xc_error error;
    xc_owner owner[2];
    xc_bell bell[2];
    xc_slot slot[XC_CHANNELS][2][2];
} xc_page;

_Static_assert(sizeof(xc_header) == 128 && offsetof(xc_page, error) == 0x80, "frozen in every ABI");
_Static_assert(sizeof(xc_slot) == 128 && offsetof(xc_slot, arrival_ns) == 64, "a slot is one line");
_Static_assert(offsetof(xc_bell, wanted) == 64 && offsetof(xc_page, slot) == 0x300, "layout");
_Static_assert(sizeof(xc_page) <= XC_PAGE, "one page");

enum { XC_TIMES = 4, XC_BUCKETS = 16 };
/* Upper bounds of all buckets but the last, which has none; nanoseconds. */
extern const int64_t xc_bounds[XC_BUCKETS - 1];

/* Exchanges by duration; times are those of xc_timings. */
typedef struct {
    uint64_t counts[XC_TIMES][XC_BUCKETS];
    int64_t sums[XC_TIMES];
} xc_times;

/* One channel as this rank sees it. The loop thread writes; a waiter thread reads. */
typedef struct {
    uint32_t words;
    _Atomic uint32_t taken_count;
    uint32_t published_count;
    _Atomic uint64_t published, taken, seen[2];
    _Atomic int64_t deadline_ns;
    int64_t own_arrival_ns, taken_ns;
    xc_times times;
} xc_lane;

/* Lives in memory that a fork wipes: in the child `alive` is 0 and the page's address is gone. */
typedef struct {
    uint32_t alive;
    int rank, peer_pid, pidfd;
    uint64_t peer_start;
    int64_t timeout_ns;
    xc_page* page;
    _Atomic uint32_t left;
    _Atomic int sleepers;
    _Atomic int64_t next_probe_ns;
    xc_lane lane[XC_CHANNELS];
} xc_handle;

/* rank: who reported it. */
typedef struct {
    xc_code code;
    int rank, channel, error_number;
    uint64_t seq;
} xc_failure;

typedef struct {
    const char* session;
    int rank;
    int64_t attach_ns, timeout_ns;
    uint32_t words[XC_CHANNELS];
} xc_options;

/* Returns when both ranks have the page; NULL with `why` filled otherwise, and then no object remains. */
xc_handle* xc_open(const xc_options* options, xc_failure* why);

/* Whether the session's object still has a name though its creator is dead or never finished it. */
int xc_is_stale(const char* session);

/* Says that this rank leaves, wakes everybody, waits for the own sleeper, unmaps. */
void xc_close(xc_handle* h);

/* All of these return -code on failure; xc_why then fills in the rest. */
int xc_publish(xc_handle* h, int channel, uint64_t epoch, const int64_t* words);
/* 1: `words` and `epoch` are the peer's next; 0: nothing within `spin_ns`. */
int xc_poll(xc_handle* h, int channel, int64_t spin_ns, uint64_t* epoch, int64_t* words);
/* From now on an arrival wakes xc_wait. 1: there is something to poll for now, and nothing was armed. */
int xc_arm(xc_handle* h, int channel);
/* Sleeps until an armed channel has an arrival, whose bit is then no longer armed; returns the bits. */
int xc_wait(xc_handle* h);
/* Of the last taken: exchange, waiting for the peer, skew of the arrivals, time after the later arrival; ns.
 * Before this rank publishes again. */
void xc_timings(const xc_handle* h, int channel, int64_t out[4]);

void xc_why(const xc_handle* h, int result, xc_failure* why);

int64_t xc_now_ns(void);
uint64_t xc_start_ticks(int pid);
/* Whether there is a process of that number and that start. */
xc_code xc_alive_as(int pid, uint64_t start);
/* Notes who the peer is by its record, and checks it. */
xc_code xc_know_peer(xc_handle* h);
/* Whether the peer still is the process that attached; XC_OK, XC_PEER_DEAD or XC_PEER_REPLACED. */
xc_code xc_probe(const xc_handle* h);
/* Sets the shared error unless there is one, poisons and wakes both ranks; returns -code of the first one. */
int xc_fail(xc_handle* h, xc_code code, int channel, int error_number);
void xc_ring(xc_bell* bell, uint32_t by);
