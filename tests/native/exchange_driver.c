/* Both ranks in one process, so that the sanitizers see every access: `driver SESSION EXCHANGES`.
 * Built with ONE_RANK: one rank of two, `driver SESSION RANK`; its exit code is that of xc_open.
 *
 * Each rank has a loop thread, which publishes, polls a while and then arms, and a waiter thread, as in the
 * engine. Every value is checked. Then the faults that need a hand on the page. Exit code 0: all as it should be.
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exchange.h"

#define SPIN_NS 10000
#define PATIENCE 50
#define MS 1000000ll

#define MUST(condition)                                                     \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _Exit(1);                                                       \
        }                                                                   \
    } while (0)

typedef struct {
    const char* session;
    int rank;
    long exchanges;
    xc_handle* h;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int arrived, ended;
    long slept;
} rank;

static int64_t word(uint64_t epoch, int from, int channel, int i) {
    uint64_t x = (epoch * 8 + (uint64_t)i) * 4 + (uint64_t)(from * 2 + channel);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (int64_t)(x ^ x >> 31);
}

static void* open_one(void* argument) {
    rank* r = argument;
    xc_options o = {r->session, r->rank, 5000 * MS, 20000 * MS, {7, 1}};
    xc_failure why;
    r->h = xc_open(&o, &why);
    if (!r->h) fprintf(stderr, "rank %d: code %d\n", r->rank, (int)why.code);
    return NULL;
}

static void* waiter(void* argument) {
    rank* r = argument;
    for (int bits = 0; bits >= 0;) {
        bits = xc_wait(r->h);
        pthread_mutex_lock(&r->lock);
        if (bits > 0) r->arrived |= bits;
        r->ended = bits < 0;
        pthread_cond_signal(&r->changed);
        pthread_mutex_unlock(&r->lock);
    }
    return NULL;
}

static void sleep_for(rank* r, int channel) {
    pthread_mutex_lock(&r->lock);
    while (!(r->arrived >> channel & 1) && !r->ended) pthread_cond_wait(&r->changed, &r->lock);
    r->arrived &= ~(1 << channel);
    pthread_mutex_unlock(&r->lock);
    r->slept++;
}

static void exchange(rank* r, int channel, uint64_t epoch) {
    int64_t words[XC_WORDS];
    uint64_t heard;
    int n = channel ? 1 : XC_WORDS;
    for (int i = 0; i < n; i++) words[i] = word(epoch, r->rank, channel, i);
    MUST(xc_publish(r->h, channel, epoch, words) == 0);
    /* Some rounds don't look at all before they sleep: the peer then has to wake somebody. */
    int tries = epoch % 64 == (uint64_t)r->rank * 7 ? 0 : PATIENCE;
    int got = xc_poll(r->h, channel, 0, &heard, words);
    for (; got == 0 && tries; tries--) {
        sched_yield();
        got = xc_poll(r->h, channel, SPIN_NS, &heard, words);
    }
    while (got == 0) {
        int armed = xc_arm(r->h, channel);
        MUST(armed >= 0);
        if (armed == 0) sleep_for(r, channel);
        got = xc_poll(r->h, channel, 0, &heard, words);
    }
    MUST(got == 1 && heard == epoch);
    for (int i = 0; i < n; i++) MUST(words[i] == word(epoch, !r->rank, channel, i));
}

static void* loop(void* argument) {
    rank* r = argument;
    for (long e = 0; e < r->exchanges; e++) {
        exchange(r, 0, (uint64_t)e);
        if (e % 3 == 0) exchange(r, 1, (uint64_t)e);
    }
    return NULL;
}

static void in_pair(rank r[2], void* (*act)(void*)) {
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) MUST(pthread_create(&threads[i], NULL, act, &r[i]) == 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

/* Rank 1 works on rank 0's mapping: two addresses of one page would hide its races. Returns its own. */
static xc_page* open_both(rank r[2]) {
    in_pair(r, open_one);
    MUST(r[0].h && r[1].h);
    xc_page* own = r[1].h->page;
    r[1].h->page = r[0].h->page;
    return own;
}

/* Rank 1's sleeper is ended first, since it sleeps on rank 0's mapping; rank 0 closes over its sleeper. */
static void close_both(rank r[2], xc_page* own, pthread_t* waiters) {
    if (waiters) {
        atomic_store(&r[1].h->left, 1);
        xc_ring(&r[0].h->page->bell[0], 2u);
        pthread_join(waiters[1], NULL);
        while (!atomic_load(&r[0].h->sleepers)) sched_yield();
    }
    r[1].h->page = own;
    xc_close(r[0].h);
    if (waiters) pthread_join(waiters[0], NULL);
    xc_close(r[1].h);
}

static void run_long(const char* session, long exchanges) {
    rank r[2];
    pthread_t waiters[2];
    for (int i = 0; i < 2; i++) {
        r[i] = (rank){.session = session, .rank = i, .exchanges = exchanges};
        pthread_mutex_init(&r[i].lock, NULL);
        pthread_cond_init(&r[i].changed, NULL);
    }
    xc_page* own = open_both(r);
    for (int i = 0; i < 2; i++) MUST(pthread_create(&waiters[i], NULL, waiter, &r[i]) == 0);
    in_pair(r, loop);
    close_both(r, own, waiters);
    printf("%ld exchanges, %ld and %ld of them slept\n", exchanges, r[0].slept, r[1].slept);
    MUST(exchanges < 1000 || (r[0].slept && r[1].slept));
}

typedef enum { TAKEN_PLACE, TORN_SLOT, BACKWARDS, OUT_OF_TURN } fault;

static xc_code provoke(rank r[2], fault which) {
    int64_t words[XC_WORDS] = {0};
    uint64_t epoch;
    xc_page* page = r[0].h->page;
    MUST(xc_publish(r[0].h, 0, 0, words) == 0);
    if (which == TAKEN_PLACE) atomic_store(&page->owner[1].start_ticks, 1);
    if (which == TORN_SLOT) atomic_store(&page->slot[0][1][0].seq, 7);
    if (which == OUT_OF_TURN) MUST(xc_publish(r[0].h, 0, 1, words) == -XC_SEQ_DIVERGED);
    if (which == BACKWARDS) {
        MUST(xc_publish(r[1].h, 0, 0, words) == 0);
        MUST(xc_poll(r[0].h, 0, 0, &epoch, words) == 1);
        atomic_store(&page->slot[0][1][1].seq, 1);
    }
    atomic_store(&r[0].h->next_probe_ns, 0);
    int found = xc_poll(r[0].h, 0, SPIN_NS, &epoch, words);
    /* The other side hears the same, and who found it. */
    MUST(xc_poll(r[1].h, 1, 0, &epoch, words) == found);
    xc_failure why;
    xc_why(r[1].h, found, &why);
    MUST(why.rank == 0 && why.code == (xc_code)-found);
    return (xc_code)-found;
}

static void run_faults(const char* session) {
    static const xc_code expected[] = {XC_PEER_REPLACED, XC_SEQ_DIVERGED, XC_SEQ_DIVERGED, XC_SEQ_DIVERGED};
    for (int which = TAKEN_PLACE; which <= OUT_OF_TURN; which++) {
        rank r[2] = {{.session = session, .rank = 0}, {.session = session, .rank = 1}};
        xc_page* own = open_both(r);
        MUST(provoke(r, (fault)which) == expected[which]);
        close_both(r, own, NULL);
    }
}

int main(int argc, char** argv) {
    MUST(argc == 3);
#ifdef ONE_RANK
    xc_options o = {argv[1], atoi(argv[2]), 5000 * MS, 5000 * MS, {7, 1}};
    xc_failure why;
    xc_handle* h = xc_open(&o, &why);
    if (h) xc_close(h);
    return (int)why.code;
#endif
    run_long(argv[1], atol(argv[2]));
    run_faults(argv[1]);
    return 0;
}
