/* Whether the other rank's process is still there, and still the same. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "exchange.h"

/* State letter and start time in ticks since boot; 0 where there is no such process. */
static uint64_t process_start(int pid, char* state) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return 0;
    text[got] = 0;
    /* The name may hold spaces and brackets: fields are counted from the last bracket. */
    char* at = strrchr(text, ')');
    if (!at || at[1] != ' ') return 0;
    *state = at[2];
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

uint64_t xc_start_ticks(int pid) {
    char state;
    return process_start(pid, &state);
}

xc_code xc_alive_as(int pid, uint64_t start) {
    char state = 'X';
    uint64_t found = process_start(pid, &state);
    if (!found || state == 'Z' || state == 'X') return XC_PEER_DEAD;
    return found == start ? XC_OK : XC_PEER_REPLACED;
}

xc_code xc_probe(const xc_handle* h) {
    const xc_owner* owner = &h->page->owner[!h->rank];
    if (atomic_load(&owner->pid) != h->peer_pid || atomic_load(&owner->start_ticks) != h->peer_start)
        return XC_PEER_REPLACED;
    /* A descriptor names the process itself, whoever gets its number later. Kernels without: see /proc. */
    struct pollfd watched = {.fd = h->pidfd, .events = POLLIN};
    if (h->pidfd >= 0) return poll(&watched, 1, 0) == 1 ? XC_PEER_DEAD : XC_OK;
    return xc_alive_as(h->peer_pid, h->peer_start);
}

/* Who the peer is, from its record, checked after a descriptor holds on to the process. */
xc_code xc_know_peer(xc_handle* h) {
    xc_owner* owner = &h->page->owner[!h->rank];
    h->peer_pid = atomic_load(&owner->pid);
    h->peer_start = atomic_load(&owner->start_ticks);
#ifdef SYS_pidfd_open
    h->pidfd = (int)syscall(SYS_pidfd_open, h->peer_pid, 0);
#endif
    return xc_alive_as(h->peer_pid, h->peer_start);
}
