/* For LD_PRELOAD: the wall clock of a process is a day ahead of this machine's.
   Times of files, timerfd and futexes that wait by the wall clock have this machine's time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define DAY 86400

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += DAY;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    return now ? *now = precise.tv_sec : precise.tv_sec;
}

/* The kernel waits by its own clock until then. */
static struct timespec own(const struct timespec *until) {
    struct timespec now, same = *until;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    if (same.tv_sec > now.tv_sec + DAY / 2) same.tv_sec -= DAY;
    return same;
}

int pthread_cond_timedwait(pthread_cond_t *of, pthread_mutex_t *lock, const struct timespec *until) {
    /* on x86-64 the first symbol found is that of old programs */
    void *found = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) =
        found ? found : dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec same = own(until);
    return wait(of, lock, &same);
}

int sem_timedwait(sem_t *of, const struct timespec *until) {
    int (*wait)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec same = own(until);
    return wait(of, &same);
}
