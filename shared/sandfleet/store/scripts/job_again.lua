-- A background job runs of which Redis lost the record: as if it had just started.
-- KEYS  1 prefix
-- ARGV  1 op id  2 sandbox  3 node  4 incarnation  5 route text  6 describe  7 reply  8 lasts ms
-- Returns 1, or 0 when there is a record, or its sandbox is not live on that route.
--@use time
local op = P .. 'op:' .. A[1]
if call('EXISTS', op) == 1 then return 0 end
local sb = call('HMGET', P .. 'sandbox:' .. A[2], 'owner', 'state', 'route')
if sb[2] ~= 'live' or sb[3] ~= A[5] or call('GET', P .. 'lease:' .. A[3]) ~= A[4] then return 0 end
local ms = now_ms()
local deadline = ms + A[8]
-- A full Redis refuses the first write, this one, so that nothing is half done.
call('HSET', op, 'kind', 'execute_command', 'route', A[5], 'owner', sb[1], 'start_by', ms, 'deadline',
  string.format('%.0f', deadline), 'reply_to', '', 'describe', A[6], 'expect', 'live', 'effect', 1,
  'state', 'claimed', 'at', ms, 'claimed', ms, 'job', 1, 'reply', A[7])
call('PEXPIREAT', op, string.format('%.0f', deadline + DAY))
local inflight, busy = P .. 'inflight:' .. A[3], P .. 'busy:' .. A[2]
call('ZADD', inflight, call('HINCRBY', P .. 'node:' .. A[3], 'seq', 1), A[1])
keep(inflight, A[8] + DAY)
call('ZADD', busy, string.format('%.0f', deadline + 30000), A[1])
keep(busy, A[8] + 60000)
call('ZREM', P .. 'warm:' .. A[3], A[2])
return 1
