/* One rank of an MPI implementation in a comparison. README.md describes the questions and the answers. */

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static int rank, ranks;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

enum { IN_FLIGHT = 10, MESSAGES = 64 };

/* Computes for a time in proportion to `steps`: each needs the result of the one before. */
static void compute(int64_t steps) {
    volatile float x = 1;
    for (int64_t i = 0; i < steps; i++)
        x = x * 0.5f + 1;
}

/* Grows a buffer. Its old content is not kept. */
static float *room(float **buffer, size_t *len, size_t wanted) {
    if (*len < wanted) {
        free(*buffer);
        if (posix_memalign((void **)buffer, 4096, wanted ? wanted : 1) != 0) {
            fprintf(stderr, "no memory\n");
            exit(1);
        }
        *len = wanted;
    }
    return *buffer;
}

/* Calls an operation once. */
static void call(const char *op, float *send, float *recv, size_t bytes, int64_t steps) {
    int count = (int)(bytes / sizeof(float)), block = count / ranks, peer = 1 - rank;
    MPI_Request requests[MESSAGES];
    if (strcmp(op, "all_reduce") == 0)
        MPI_Allreduce(MPI_IN_PLACE, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (strcmp(op, "barrier") == 0)
        MPI_Barrier(MPI_COMM_WORLD);
    else if (strcmp(op, "broadcast") == 0)
        MPI_Bcast(send, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
    else if (strcmp(op, "all_gather") == 0)
        MPI_Allgather(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, MPI_COMM_WORLD);
    else if (strcmp(op, "reduce_scatter") == 0)
        MPI_Reduce_scatter_block(send, recv, block, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (strcmp(op, "all_to_all") == 0)
        MPI_Alltoall(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, MPI_COMM_WORLD);
    else if (strcmp(op, "in_flight") == 0 || strcmp(op, "overlap") == 0) {
        int many = op[0] == 'i' ? IN_FLIGHT : 1;
        for (int i = 0; i < many; i++)
            MPI_Iallreduce(MPI_IN_PLACE, recv + (size_t)i * count, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &requests[i]);
        compute(steps);
        MPI_Waitall(many, requests, MPI_STATUSES_IGNORE);
    } else if (strcmp(op, "ping_pong") == 0) {
        if (rank == 0)
            MPI_Send(send, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD);
        MPI_Recv(recv, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1)
            MPI_Send(send, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD);
    } else if (strcmp(op, "bandwidth") == 0) {
        for (int i = 0; i < MESSAGES; i++) {
            if (rank == 0)
                MPI_Isend(send, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, &requests[i]);
            else
                MPI_Irecv(recv, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, &requests[i]);
        }
        MPI_Waitall(MESSAGES, requests, MPI_STATUSES_IGNORE);
        float answer = 0;
        if (rank == 0)
            MPI_Recv(&answer, 1, MPI_FLOAT, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else
            MPI_Send(&answer, 1, MPI_FLOAT, peer, 1, MPI_COMM_WORLD);
    } else if (strcmp(op, "compute") == 0) {
        compute(steps);
    } else {
        fprintf(stderr, "%s is unknown\n", op);
        exit(1);
    }
}

/* Returns how many nanoseconds these calls take, after a barrier. */
static int64_t time_of(int calls, const char *op, float *send, float *recv, size_t bytes, int64_t steps) {
    MPI_Barrier(MPI_COMM_WORLD);
    int64_t began = now();
    for (int i = 0; i < calls; i++)
        call(op, send, recv, bytes, steps);
    return now() - began;
}

/* Returns the steps of a computation that takes as long as a nonblocking all-reduce on the slowest rank. */
static int64_t steps_as_long_as_a_call(float *recv, size_t bytes, int warmup, int calls) {
    enum { STEPS = 1 << 16 };
    time_of(warmup * calls, "overlap", NULL, recv, bytes, 0);
    double each = (double)time_of(calls, "overlap", NULL, recv, bytes, 0) / calls;
    int64_t steps = (int64_t)(each / ((double)time_of(4, "compute", NULL, NULL, 0, STEPS) / (4 * STEPS)));
    MPI_Allreduce(MPI_IN_PLACE, &steps, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD);
    return steps;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);

    if (argc < 3) {
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Finalize();
        return 0;
    }

    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", argv[2]);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        perror(argv[2]);
        return 1;
    }
    FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");
    fprintf(out, "%s %d\n", argv[1], rank);
    fflush(out);

    float *send = NULL, *recv = NULL;
    size_t send_len = 0, recv_len = 0;
    char op[32];
    size_t bytes;
    int warmup, iters, calls;
    while (fscanf(in, "%31s %zu %d %d %d", op, &bytes, &warmup, &iters, &calls) == 5) {
        int many = strcmp(op, "in_flight") == 0 ? IN_FLIGHT : 1, overlaps = strcmp(op, "overlap") == 0;
        int operations = strcmp(op, "ping_pong") == 0 ? 2 : strcmp(op, "bandwidth") == 0 ? MESSAGES : many;
        room(&send, &send_len, bytes);
        room(&recv, &recv_len, bytes * many);
        memset(send, 0, bytes);
        memset(recv, 0, bytes * many);
        int64_t steps = overlaps ? steps_as_long_as_a_call(recv, bytes, warmup, calls) : 0;
        int64_t alone = overlaps ? time_of(calls, "compute", NULL, NULL, 0, steps) : 0;
        for (int i = 0; i < warmup + iters; i++) {
            int64_t took = time_of(calls, op, send, recv, bytes, steps);
            if (i >= warmup)
                fprintf(out, "%lld ", (long long)((took > alone ? took - alone : 0) / calls / operations));
        }
        fprintf(out, "\n");
        fflush(out);
    }
    MPI_Finalize();
    return 0;
}
