// An exchange of bytes both ways over TCP between two processes: by system calls, by io_uring, and by
// io_uring that sends without a copy. Prints medians of interleaved rounds, and of their ratios to system
// calls. By io_uring, bytes took 1.0 to 1.2 times as long, and without a copy 1.3 to 2.9 times, so kolo
// uses neither.
//
//     cc -O2 -o exchange tests/hosts/exchange.c
//     ./exchange server 127.0.0.1 & ./exchange client 127.0.0.1

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/io_uring.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PORT = 29555, ROUNDS = 9, FORMS = 3 };
static const size_t SIZES[] = {8, 4096, 65536, 1 << 20, 16 << 20};
static const char *NAMES[FORMS] = {"system calls", "io_uring", "io_uring, no copy"};

static char *out, *in;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double microseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

// As kolo does: what can move moves, and then the process waits.
static void by_calls(int fd, size_t n) {
    size_t sent = 0, got = 0;
    while (sent < n || got < n) {
        int has_moved = 0;
        if (sent < n) {
            ssize_t moved = send(fd, out + sent, n - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (moved > 0) {
                sent += moved, has_moved = 1;
            } else if (errno != EAGAIN) {
                fail("send");
            }
        }
        if (got < n) {
            ssize_t moved = recv(fd, in + got, n - got, MSG_DONTWAIT);
            if (moved > 0) {
                got += moved, has_moved = 1;
            } else if (moved == 0 || errno != EAGAIN) {
                fail("recv");
            }
        }
        if (!has_moved) {
            struct pollfd ready = {fd, POLLIN | (sent < n ? POLLOUT : 0), 0};
            poll(&ready, 1, -1);
        }
    }
}

// ---- io_uring, without its library ----

static int ring;
static unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
static struct io_uring_sqe *sqes;
static struct io_uring_cqe *cqes;

static void *map(size_t bytes, off_t what) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
    if (at == MAP_FAILED) {
        fail("mmap");
    }
    return at;
}

static void open_ring(void) {
    struct io_uring_params p = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    ring = syscall(SYS_io_uring_setup, 8, &p);
    if (ring < 0) {
        fail("io_uring_setup");
    }
    char *sq = map(p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    char *cq = map(p.cq_off.cqes + p.cq_entries * sizeof *cqes, IORING_OFF_CQ_RING);
    sqes = map(p.sq_entries * sizeof *sqes, IORING_OFF_SQES);
    sq_tail = (unsigned *)(sq + p.sq_off.tail), sq_mask = (unsigned *)(sq + p.sq_off.ring_mask);
    sq_array = (unsigned *)(sq + p.sq_off.array);
    cq_head = (unsigned *)(cq + p.cq_off.head), cq_tail = (unsigned *)(cq + p.cq_off.tail);
    cq_mask = (unsigned *)(cq + p.cq_off.ring_mask), cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
}

static void submit(int op, int fd, void *buffer, size_t len) {
    unsigned tail = *sq_tail, index = tail & *sq_mask;
    memset(&sqes[index], 0, sizeof *sqes);
    sqes[index].opcode = op, sqes[index].fd = fd, sqes[index].user_data = op;
    sqes[index].addr = (unsigned long)buffer, sqes[index].len = len;
    sq_array[index] = index;
    __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
}

static void by_ring(int fd, size_t n, int send_op) {
    size_t sent = 0, got = 0;
    unsigned submitted = 0;
    // What has been submitted and has not ended; and the sends whose memory the system still uses.
    int sends = 0, receives = 0, used = 0;
    while (sent < n || got < n || used) {
        if (!sends && sent < n) {
            submit(send_op, fd, out + sent, n - sent), submitted++, sends = 1;
        }
        if (!receives && got < n) {
            submit(IORING_OP_RECV, fd, in + got, n - got), submitted++, receives = 1;
        }
        int taken = syscall(SYS_io_uring_enter, ring, submitted, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        if (taken < 0) {
            fail("io_uring_enter");
        }
        submitted -= taken;
        unsigned head = *cq_head;
        for (; head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE); head++) {
            const struct io_uring_cqe *end = &cqes[head & *cq_mask];
            if (end->flags & IORING_CQE_F_NOTIF) {
                used--;
                continue;
            }
            if (end->res <= 0) {
                errno = -end->res;
                fail(NAMES[1]);
            }
            if (end->user_data == IORING_OP_RECV) {
                got += end->res, receives = 0;
            } else {
                sent += end->res, sends = 0, used += (end->flags & IORING_CQE_F_MORE) != 0;
            }
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    }
}

// ---- The measurement ----

static int connection(int is_server, const char *address) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    if (!inet_aton(address, &at.sin_addr)) {
        fail(address);
    }
    if (is_server) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, (void *)&at, sizeof at) || listen(fd, 1)) {
            fail("bind");
        }
        fd = accept(fd, NULL, NULL);
    }
    for (int tries = 0; !is_server && connect(fd, (void *)&at, sizeof at); tries++) {
        if (tries == 500) {
            fail("connect");
        }
        close(fd), usleep(10000), fd = socket(AF_INET, SOCK_STREAM, 0);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static int order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int count, char **words) {
    if (count != 3 || (strcmp(words[1], "server") && strcmp(words[1], "client"))) {
        fprintf(stderr, "usage: exchange server|client ADDRESS_OF_SERVER\n");
        return 2;
    }
    int is_server = !strcmp(words[1], "server"), fd = connection(is_server, words[2]);
    const size_t most = SIZES[sizeof SIZES / sizeof *SIZES - 1];
    out = malloc(most), in = malloc(most);
    memset(out, 1, most), memset(in, 1, most);
    open_ring();
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        const size_t n = SIZES[i];
        const int calls = n < 65536 ? 500 : n < (1 << 20) ? 200 : n < (16 << 20) ? 20 : 4;
        double times[FORMS][ROUNDS], ratios[FORMS][ROUNDS];
        for (int round = 0; round < ROUNDS; round++) {
            for (int form = 0; form < FORMS; form++) {
                by_calls(fd, 8);
                const double began = microseconds();
                for (int call = 0; call < calls; call++) {
                    form ? by_ring(fd, n, form == 1 ? IORING_OP_SEND : IORING_OP_SEND_ZC) : by_calls(fd, n);
                }
                times[form][round] = (microseconds() - began) / calls;
                ratios[form][round] = times[form][round] / times[0][round];
            }
        }
        for (int form = 0; form < FORMS; form++) {
            qsort(times[form], ROUNDS, sizeof(double), order), qsort(ratios[form], ROUNDS, sizeof(double), order);
            if (!is_server) {
                printf("%9zu B  %-18s %10.1f us  %.2f\n", n, NAMES[form], times[form][ROUNDS / 2], ratios[form][ROUNDS / 2]);
            }
        }
    }
}
