/* How two ranks get one page, and part. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "exchange.h"

#define RETRY_NS 500000
#define UNFINISHED_S 60
#define NAME_BYTES (XC_SESSION + 16)

static uint64_t pid_namespace(void) {
    struct stat found;
    return stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

static int valid_session(const char* session) {
    size_t n = strspn(session, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-");
    return n && n < XC_SESSION && !session[n];
}

static void rest(void) {
    struct timespec wait = {0, RETRY_NS};
    nanosleep(&wait, NULL);
}

static void claim(xc_owner* owner) {
    atomic_store(&owner->pid, getpid());
    atomic_store(&owner->start_ticks, xc_start_ticks(getpid()));
    atomic_store(&owner->state, XC_ATTACHED);
}

static xc_code system_failed(xc_failure* why) {
    why->error_number = errno;
    return XC_SYSCALL;
}

static xc_code map(int fd, xc_handle* h, xc_failure* why) {
    void* at = mmap(NULL, XC_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return system_failed(why);
    h->page = at;
    /* A child has no business here; its copy of the handle is wiped, too. */
    return madvise(at, XC_PAGE, MADV_DONTFORK) ? system_failed(why) : XC_OK;
}

/* Rank 0. The name is new, or nothing is done: an object that is there belongs to somebody, alive or dead. */
static xc_code create(const xc_options* o, const char* name, xc_handle* h, xc_failure* why) {
    int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return errno == EEXIST ? XC_OWNER_CONFLICT : system_failed(why);
    /* Reserved now: memory that runs out later would be a signal in the middle of a step. */
    int failed = posix_fallocate(fd, 0, XC_PAGE);
    why->error_number = failed;
    xc_code code = failed ? XC_SYSCALL : map(fd, h, why);
    close(fd);
    if (code) {
        shm_unlink(name);
        return code;
    }
    xc_header* header = &h->page->header;
    header->magic = XC_MAGIC;
    header->abi = XC_ABI_VERSION;
    header->header_bytes = sizeof *header;
    header->total_bytes = XC_PAGE;
    header->world = 2;
    header->channels = XC_CHANNELS;
    memcpy(header->words, o->words, sizeof header->words);
    header->pid_namespace = pid_namespace();
    snprintf(header->session, sizeof header->session, "%s", o->session);
    claim(&h->page->owner[0]);
    atomic_store(&header->ready, 1);
    return XC_OK;
}

static xc_code await_peer(const xc_options* o, xc_handle* h, int64_t until) {
    xc_owner* owner = &h->page->owner[!o->rank];
    for (;; rest()) {
        uint64_t word = atomic_load(&h->page->error.word);
        if (word) return (xc_code)(word & 255);
        /* It may even have left again, which is for the first exchange to tell. */
        if (atomic_load(&owner->state) >= XC_ATTACHED) return XC_OK;
        if (xc_now_ns() >= until) return XC_TIMEOUT;
    }
}

static xc_code check_header(const xc_options* o, const xc_header* header) {
    if (header->magic != XC_MAGIC || header->abi != XC_ABI_VERSION) return XC_ABI;
    if (header->header_bytes != sizeof *header || header->total_bytes != XC_PAGE || header->world != 2 ||
        header->channels != XC_CHANNELS || memcmp(header->words, o->words, sizeof header->words))
        return XC_GEOMETRY;
    if (strncmp(header->session, o->session, XC_SESSION) || header->pid_namespace != pid_namespace())
        return XC_SESSION_ID;
    return XC_OK;
}

/* Rank 1: waits for the object, then for its creator to have filled it. */
static xc_code find(const xc_options* o, const char* name, xc_handle* h, int64_t until, xc_failure* why) {
    int fd;
    struct stat found;
    while ((fd = shm_open(name, O_RDWR | O_CLOEXEC, 0)) < 0) {
        if (errno != ENOENT) return system_failed(why);
        if (xc_now_ns() >= until) return XC_TIMEOUT;
        rest();
    }
    while (fstat(fd, &found) == 0 && found.st_size < XC_PAGE && xc_now_ns() < until) rest();
    xc_code code = found.st_size < XC_PAGE                                       ? XC_TIMEOUT
                   : found.st_uid != geteuid() || (found.st_mode & 0777) != 0600 ? XC_SESSION_ID
                                                                                 : map(fd, h, why);
    close(fd);
    if (code) return code;
    while (!atomic_load(&h->page->header.ready)) {
        if (xc_now_ns() >= until) return XC_TIMEOUT;
        rest();
    }
    code = check_header(o, &h->page->header);
    if (code) return code;
    uint32_t absent = XC_ABSENT;
    xc_owner* own = &h->page->owner[1];
    if (!atomic_compare_exchange_strong(&own->state, &absent, XC_CLAIMED)) return XC_OWNER_CONFLICT;
    return XC_OK;
}

static void discard(xc_handle* h) {
    /* In a child all of it is 0, and what the numbers named is the parent's. */
    if (h->alive && h->pidfd >= 0) close(h->pidfd);
    if (h->alive && h->page) munmap(h->page, XC_PAGE);
    munmap(h, sizeof *h);
}

static xc_handle* new_handle(const xc_options* o, xc_failure* why) {
    xc_handle* h = mmap(NULL, sizeof *h, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (h == MAP_FAILED || madvise(h, sizeof *h, MADV_WIPEONFORK)) {
        why->code = system_failed(why);
        if (h != MAP_FAILED) munmap(h, sizeof *h);
        return NULL;
    }
    h->alive = 1;
    h->rank = o->rank;
    h->pidfd = -1;
    h->timeout_ns = o->timeout_ns;
    for (int c = 0; c < XC_CHANNELS; c++) h->lane[c].words = o->words[c];
    return h;
}

static xc_code attach(const xc_options* o, const char* name, xc_handle* h, xc_failure* why) {
    int64_t until = xc_now_ns() + o->attach_ns;
    xc_code code = o->rank ? find(o, name, h, until, why) : create(o, name, h, why);
    if (code == XC_OWNER_CONFLICT || (code && !h->page)) return code;
    if (!code && o->rank) code = xc_know_peer(h);
    if (!code && o->rank) claim(&h->page->owner[1]);
    if (!code && !o->rank) code = await_peer(o, h, until);
    if (!code && !o->rank) code = xc_know_peer(h);
    /* Both have it, or nobody shall: a name that isn't there can't be left behind. */
    shm_unlink(name);
    if (!code) code = (xc_code)(atomic_load(&h->page->error.word) & 255);
    if (code) {
        /* Error block and bells are where every ABI has them; the peer hears of it in its wait. */
        uint64_t none = 0;
        atomic_compare_exchange_strong(&h->page->error.word, &none, (uint64_t)code | (uint64_t)o->rank << 8);
        why->rank = (int)(atomic_load(&h->page->error.word) >> 8 & 255);
    }
    return code;
}

int xc_is_stale(const char* session) {
    char name[NAME_BYTES];
    struct stat found;
    if (!valid_session(session)) return 0;
    snprintf(name, sizeof name, XC_PREFIX "%s", session);
    int fd = shm_open(name, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return 0;
    int sized = fstat(fd, &found) == 0 && found.st_size >= XC_PAGE;
    const xc_page* page = sized ? mmap(NULL, XC_PAGE, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (page == MAP_FAILED) return !sized && time(NULL) - found.st_mtime > UNFINISHED_S;
    int ready = page->header.magic == XC_MAGIC && atomic_load(&page->header.ready);
    int ours = ready && page->header.pid_namespace == pid_namespace();
    const xc_owner* owner = &page->owner[0];
    int stale = ours && xc_alive_as(atomic_load(&owner->pid), atomic_load(&owner->start_ticks)) != XC_OK;
    if (!ready) stale = time(NULL) - found.st_mtime > UNFINISHED_S;
    munmap((void*)page, XC_PAGE);
    return stale;
}

xc_handle* xc_open(const xc_options* o, xc_failure* why) {
    *why = (xc_failure){.code = XC_OK, .rank = o->rank};
    int fits = o->rank == 0 || o->rank == 1;
    for (int c = 0; c < XC_CHANNELS; c++) fits = fits && o->words[c] <= XC_WORDS;
    if (!fits || o->timeout_ns <= 0 || !valid_session(o->session)) {
        why->code = fits ? XC_SESSION_ID : XC_GEOMETRY;
        return NULL;
    }
    char name[NAME_BYTES];
    snprintf(name, sizeof name, XC_PREFIX "%s", o->session);
    xc_handle* h = new_handle(o, why);
    if (!h) return NULL;
    why->code = attach(o, name, h, why);
    if (why->code == XC_OK) return h;
    discard(h);
    return NULL;
}

void xc_close(xc_handle* h) {
    if (h->alive) {
        atomic_store(&h->left, 1);
        atomic_store(&h->page->owner[h->rank].state, XC_LEFT);
        for (int rank = 0; rank < 2; rank++) xc_ring(&h->page->bell[rank], 2u);
        while (atomic_load(&h->sleepers)) rest();
    }
    discard(h);
}
