/* The protocol on an attached page; see exchange.h for the layout and why two slots suffice. */
#define _GNU_SOURCE
#include "exchange.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000ll
#define PROBE_NS MS
#define IDLE_SLICE_NS (10 * MS)
/* The first passes poll without a pause, which costs up to 140 cycles; a clock is read every 32 passes. */
#define EAGER_PASSES 64
#define CLOCK_MASK 31u

#define GET(place) atomic_load_explicit(&(place), memory_order_acquire)
#define PEEK(place) atomic_load_explicit(&(place), memory_order_relaxed)
#define PUT(place, value) atomic_store_explicit(&(place), value, memory_order_release)
#define SET(place, value) atomic_store_explicit(&(place), value, memory_order_relaxed)

static inline void pause_once(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

int64_t xc_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void xc_ring(xc_bell* bell, uint32_t by) {
    if (by == XC_POISON)
        atomic_fetch_or(&bell->rung, XC_POISON);
    else
        atomic_fetch_add(&bell->rung, by);
    syscall(SYS_futex, (void*)&bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

int xc_fail(xc_handle* h, xc_code code, int channel, int error_number) {
    xc_error* e = &h->page->error;
    uint64_t none = 0, word = (uint64_t)code | (uint64_t)h->rank << 8 | (uint64_t)channel << 16;
    word |= (uint64_t)error_number << 24;
    SET(e->seq[h->rank], PEEK(h->lane[channel].taken) + 1);
    int first = atomic_compare_exchange_strong(&e->word, &none, word);
    for (int rank = 0; rank < 2; rank++) xc_ring(&h->page->bell[rank], XC_POISON);
    return first ? -(int)code : -(int)(none & 255);
}

static inline int shared_error(const xc_handle* h) { return -(int)(GET(h->page->error.word) & 255); }

void xc_why(const xc_handle* h, int result, xc_failure* why) {
    *why = (xc_failure){.code = (xc_code)-result, .rank = -1};
    if (!h->alive || why->code == XC_FORKED) return;
    why->rank = why->code == XC_CLOSED && !PEEK(h->left) ? !h->rank : h->rank;
    uint64_t word = GET(h->page->error.word);
    if (why->code != (xc_code)(word & 255)) return;
    why->rank = (int)(word >> 8 & 255);
    why->channel = (int)(word >> 16 & 255);
    why->error_number = (int)(word >> 24);
    why->seq = PEEK(h->page->error.seq[why->rank & 1]);
}

const int64_t xc_bounds[XC_BUCKETS - 1] = {100,   200,    500,    1000,   2000,    5000,     10000,    20000,
                                           50000, 100000, 200000, 500000, 1000000, 10000000, 100000000};

/* Counts one exchange that is complete: this rank has published, and taken what the peer published. */
static void note_times(xc_lane* lane, int64_t own, int64_t peer, int64_t done) {
    int64_t later = peer > own ? peer : own;
    int64_t t[XC_TIMES] = {done - own, later - own, peer > own ? peer - own : own - peer, done - later};
    for (int i = 0; i < XC_TIMES; i++) {
        int bucket = 0;
        while (bucket < XC_BUCKETS - 1 && t[i] > xc_bounds[bucket]) bucket++;
        lane->times.counts[i][bucket]++;
        lane->times.sums[i] += t[i];
    }
}

int xc_publish(xc_handle* h, int channel, uint64_t epoch, const int64_t* words) {
    if (!h->alive) return -XC_FORKED;
    if (PEEK(h->left)) return -XC_CLOSED;
    xc_page* page = h->page;
    xc_lane* lane = &h->lane[channel];
    uint64_t seq = epoch + 1, published = PEEK(lane->published), taken = PEEK(lane->taken);
    int failed = shared_error(h);
    if (failed) return failed;
    /* The peer's line is on its way while the own one is written. */
    __builtin_prefetch(&page->slot[channel][!h->rank][PEEK(lane->taken_count) & 1]);
    if (seq <= published || taken < published || (taken > published && seq != taken))
        return xc_fail(h, XC_SEQ_DIVERGED, channel, 0);
    int64_t now = xc_now_ns();
    xc_slot* slot = &page->slot[channel][h->rank][lane->published_count & 1];
    for (uint32_t i = 0; i < lane->words; i++) PUT(slot->words[i], words[i]);
    SET(slot->arrival_ns, now);
    PUT(slot->seq, seq);
    xc_bell* bell = &page->bell[h->rank];
    /* Sequentially consistent, as are the two operations of xc_arm: one of both sides sees the other. */
    uint32_t rung = atomic_fetch_add(&bell->rung, 2u);
    if (atomic_load(&bell->wanted) >> channel & 1)
        syscall(SYS_futex, (void*)&bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    lane->published_count++;
    lane->own_arrival_ns = now;
    if (taken < seq)
        PUT(lane->deadline_ns, now + h->timeout_ns);
    else /* It was taken before this rank published. */
        note_times(lane, now, PEEK(page->slot[channel][!h->rank][(PEEK(lane->taken_count) - 1) & 1].arrival_ns),
                   now);
    PUT(lane->published, seq);
    return rung & XC_POISON ? shared_error(h) : 0;
}

/* 1: the slot holds something new, -code: something impossible, 0: what it held before. */
static inline int look(xc_handle* h, int channel, const xc_slot** found, uint64_t* seq) {
    const xc_lane* lane = &h->lane[channel];
    uint32_t at = GET(lane->taken_count) & 1;
    const xc_slot* slot = &h->page->slot[channel][!h->rank][at];
    *found = slot;
    *seq = GET(slot->seq);
    uint64_t published = PEEK(lane->published), taken = PEEK(lane->taken);
    if (*seq <= taken) return *seq == PEEK(lane->seen[at]) ? 0 : -XC_SEQ_DIVERGED;
    return published > taken && *seq != published ? -XC_SEQ_DIVERGED : 1;
}

static int take(xc_handle* h, int channel, uint64_t* epoch, int64_t* words) {
    const xc_slot* slot;
    uint64_t seq;
    int found = shared_error(h);
    if (found) return found;
    found = look(h, channel, &slot, &seq);
    if (found == 0) return 0;
    xc_lane* lane = &h->lane[channel];
    for (uint32_t i = 0; i < lane->words; i++) words[i] = GET(slot->words[i]);
    if (found < 0 || PEEK(slot->seq) != seq) return xc_fail(h, XC_SEQ_DIVERGED, channel, 0);
    uint32_t count = PEEK(lane->taken_count);
    SET(lane->seen[count & 1], seq);
    PUT(lane->deadline_ns, 0);
    PUT(lane->taken, seq);
    PUT(lane->taken_count, count + 1);
    lane->taken_ns = xc_now_ns();
    if (PEEK(lane->published) == seq)
        note_times(lane, lane->own_arrival_ns, PEEK(slot->arrival_ns), lane->taken_ns);
    *epoch = seq - 1;
    return 1;
}

/* What else could be wrong: the peer has left or died, or the deadline has passed. An arrival goes first. */
static int check(xc_handle* h, int channel, int64_t now) {
    const xc_slot* slot;
    uint64_t seq;
    int left = GET(h->page->owner[!h->rank].state) == XC_LEFT;
    xc_code peer = XC_OK;
    if (now >= PEEK(h->next_probe_ns)) {
        SET(h->next_probe_ns, now + PROBE_NS);
        peer = xc_probe(h);
    }
    int64_t deadline = GET(h->lane[channel].deadline_ns);
    int late = deadline && now >= deadline;
    if ((!left && !peer && !late) || look(h, channel, &slot, &seq) != 0) return 0;
    if (left) return -XC_CLOSED;
    /* Read again: the loop may have published and armed a new deadline since. */
    if (!peer && GET(h->lane[channel].deadline_ns) != deadline) return 0;
    return xc_fail(h, peer ? peer : XC_TIMEOUT, channel, 0);
}

int xc_poll(xc_handle* h, int channel, int64_t spin_ns, uint64_t* epoch, int64_t* words) {
    if (!h->alive) return -XC_FORKED;
    if (PEEK(h->left)) return -XC_CLOSED;
    /* Who looks itself needs no waking: the peer is spared the system call. */
    xc_bell* bell = &h->page->bell[!h->rank];
    if (spin_ns && PEEK(bell->wanted) >> channel & 1) atomic_fetch_and(&bell->wanted, ~(1u << channel));
    int64_t now = 0, until = 0;
    for (uint32_t pass = 0;; pass++) {
        int found = take(h, channel, epoch, words);
        if (found || !spin_ns) {
            if (found) return found;
            break;
        }
        if (pass >= EAGER_PASSES) pause_once();
        if ((pass & CLOCK_MASK) != CLOCK_MASK) continue;
        now = xc_now_ns();
        if (!until) until = now + spin_ns;
        if (now >= until) break;
    }
    int failed = check(h, channel, now ? now : xc_now_ns());
    return failed ? failed : take(h, channel, epoch, words);
}

int xc_arm(xc_handle* h, int channel) {
    const xc_slot* slot;
    uint64_t seq;
    if (!h->alive) return -XC_FORKED;
    if (PEEK(h->left)) return -XC_CLOSED;
    xc_bell* bell = &h->page->bell[!h->rank];
    atomic_fetch_or(&bell->wanted, 1u << channel);
    uint32_t rung = atomic_load(&bell->rung);
    if (!(rung & XC_POISON) && look(h, channel, &slot, &seq) == 0) return 0;
    atomic_fetch_and(&bell->wanted, ~(1u << channel));
    return 1;
}

/* The armed channels with an arrival, no longer armed. `others`: those that the loop is about to look for. */
static int claim(xc_handle* h, int* others) {
    const xc_slot* slot;
    uint64_t seq;
    _Atomic uint32_t* wanted = &h->page->bell[!h->rank].wanted;
    int claimed = 0;
    *others = 0;
    for (int c = 0; c < XC_CHANNELS; c++) {
        if (!h->lane[c].words || look(h, c, &slot, &seq) == 0) continue;
        if (PEEK(*wanted) >> c & 1 && atomic_fetch_and(wanted, ~(1u << c)) >> c & 1)
            claimed |= 1 << c;
        else
            *others |= 1 << c;
    }
    return claimed;
}

static void doze(_Atomic uint32_t* word, uint32_t seen, int64_t until_ns) {
    struct timespec at = {until_ns / 1000000000, until_ns % 1000000000};
    syscall(SYS_futex, (void*)word, FUTEX_WAIT_BITSET, seen, &at, NULL, FUTEX_BITSET_MATCH_ANY);
}

static int sleep_until_arrival(xc_handle* h) {
    xc_bell* bell = &h->page->bell[!h->rank];
    for (;;) {
        uint32_t rung = atomic_load(&bell->rung);
        if (GET(h->left)) return -XC_CLOSED;
        int failed = shared_error(h), others;
        if (failed) return failed;
        int claimed = claim(h, &others);
        if (claimed) return claimed;
        int64_t now = xc_now_ns(), until = now + IDLE_SLICE_NS;
        for (int c = 0; c < XC_CHANNELS && !others; c++) {
            if (!h->lane[c].words) continue;
            failed = check(h, c, now);
            if (failed) return failed;
            if (GET(h->lane[c].deadline_ns)) until = now + PROBE_NS;
        }
        doze(&bell->rung, rung, until);
    }
}

int xc_wait(xc_handle* h) {
    if (!h->alive) return -XC_FORKED;
    atomic_fetch_add(&h->sleepers, 1);
    int result = sleep_until_arrival(h);
    atomic_fetch_sub(&h->sleepers, 1);
    return result;
}

void xc_timings(const xc_handle* h, int channel, int64_t out[4]) {
    const xc_lane* lane = &h->lane[channel];
    int64_t own = lane->own_arrival_ns, done = lane->taken_ns;
    int64_t peer = PEEK(h->page->slot[channel][!h->rank][(PEEK(lane->taken_count) - 1) & 1].arrival_ns);
    int64_t later = peer > own ? peer : own;
    out[0] = done - own;
    out[1] = later - own;
    out[2] = peer > own ? peer - own : own - peer;
    out[3] = done - later;
}
