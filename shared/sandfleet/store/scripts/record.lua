-- Record an operation, mark its sandbox busy and publish it; or say why not. Hot path.
-- KEYS  1 prefix
-- ARGV  1 op id  2 kind  3 sandbox  4 node  5 incarnation  6 epoch  7 owner  8 start_by ms  9 deadline ms
--       10 reply_to  11 describe  12 expect  13 effect 0|1  14 max inflight  15 queue or ''  16 message
-- Returns {status, now ms, current route, state, reply}; trailing ones are absent where they mean nothing.
--@use time
local ms = now_ms()
local op, node = P .. 'op:' .. A[1], A[4]
if call('EXISTS', op) == 1 then
  local o = call('HMGET', op, 'route', 'kind', 'owner', 'state', 'reply')
  if o[2] == A[2] and o[3] == A[7] and string.find(o[1], A[3] .. '|', 1, true) == 1 then
    return { 'duplicate', ms, o[1], o[4], o[5] or (o[4] == 'done' and call('GET', P .. 'answer:' .. A[1])) }
  end
  return { 'conflict', ms }
end
local route = A[3] .. '|' .. node .. '|' .. A[5] .. '|' .. A[6]
local sb = call('HMGET', P .. 'sandbox:' .. A[3], 'owner', 'state', 'route')
if A[12] ~= 'node' then
  if sb[1] ~= A[7] then return { 'not_found', ms } end
  if sb[2] ~= A[12] and (sb[2] ~= 'live' or sb[3] == route) then return { sb[2], ms, sb[3] } end
  if sb[3] ~= route then return { 'moved', ms, sb[3] } end
end
if call('GET', P .. 'lease:' .. node) ~= A[5] then return { 'node_down', ms, route } end
local state = call('HGET', P .. 'node:' .. node, 'state')
if not state or state == 'gone' then return { 'node_down', ms, route } end
if state == 'draining' and A[12] ~= 'stopping' then return { 'draining', ms, route } end
-- Nobody takes anything there until the node is back.
if state == 'away' then return { 'away', ms, route } end
local inflight = P .. 'inflight:' .. node
local held = call('ZCARD', inflight)
if held >= tonumber(A[14]) then return { 'busy', ms, route } end

-- An effect's op id is protected for an hour past its deadline: whoever repeats it may have been down for long.
local deadline = math.min(tonumber(A[9]), ms + 2 * DAY)
local ends = math.max(deadline, ms) + (A[13] == '1' and 3600000 or 600000)
-- A full Redis refuses the first write, this one, so that nothing is half done.
call('HSET', op, 'kind', A[2], 'route', route, 'owner', A[7], 'start_by', A[8], 'deadline', deadline,
  'reply_to', A[10], 'describe', A[11], 'expect', A[12], 'effect', A[13], 'state', 'recorded', 'at', ms)
call('PEXPIREAT', op, ends)
call('ZADD', inflight, call('HINCRBY', P .. 'node:' .. node, 'seq', 1), A[1])
if held == 0 then call('PEXPIRE', inflight, 2 * DAY) end
if A[12] == 'live' then
  local busy = P .. 'busy:' .. A[3]
  call('ZADD', busy, deadline + 30000, A[1])
  call('PEXPIRE', busy, math.max(2 * DAY, deadline - ms + 60000))
  call('ZREM', P .. 'warm:' .. node, A[3])
  call('HSET', P .. 'sandbox:' .. A[3], 'used', ms)
end
if A[15] ~= '' then call('LPUSH', A[15], A[16]) end
return { 'recorded', ms }
