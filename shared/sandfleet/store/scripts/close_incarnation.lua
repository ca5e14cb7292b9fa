-- Answer for a node that died (no incarnation given: it is retired) or came back (all others are closed).
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation to keep or ''  3 reason  4 limit
-- Returns {not started, unknown, more 0|1, {lost sandboxes}}
--@use time route story reply line use waiters sandbox output close blanks
local ms = now_ms()
local node, kept, limit = A[1], A[2], tonumber(A[4])
local key, lease = P .. 'node:' .. node, P .. 'lease:' .. node
local current = call('HGET', key, 'incarnation')
if kept == '' then
  if call('EXISTS', lease) == 1 then return { 0, 0, 0, {} } end
elseif current and current ~= kept then
  return { 0, 0, 0, {} }
end

if kept == '' and current and call('HGET', key, 'state') ~= 'gone' then
  call('HSET', key, 'state', 'gone', 'retired', current)
  story(node, ms, 'closed', text('incarnation', current) .. text('reason', A[3]))
end

local closed, doubtful, handled = 0, 0, 0
local inflight = P .. 'inflight:' .. node
local ids = call('ZRANGE', inflight, 0, limit - 1)
for _, id in ipairs(ids) do
  local o = call('HMGET', P .. 'op:' .. id, 'state', 'route', 'reply_to', 'effect')
  local inc
  if o[1] then inc = select(3, split(o[2])) end
  -- Records are taken for the lease's holder alone, so from its first entry on all are its own.
  if inc and inc == kept then break end
  handled = handled + 1
  if o[1] == 'recorded' or (o[1] == 'claimed' and o[4] == '0') then
    not_started(id, o[2], o[3], ms, A[3])
    closed = closed + 1
  elseif o[1] == 'claimed' then
    unknown(id, o[2], o[3], ms, A[3])
    doubtful = doubtful + 1
  else
    call('ZREM', inflight, id)
  end
end

if current ~= kept then drop_blanks(node) end
local lost, more = {}, handled == limit and call('ZCARD', inflight) > 0
for _, sid in ipairs(call('ZRANGE', P .. 'places:' .. node, 0, -1)) do
  if #lost == limit then
    more = true
    break
  end
  local sb = call('HMGET', P .. 'sandbox:' .. sid, 'state', 'route', 'owner')
  local _, home, inc
  if sb[1] then _, home, inc = split(sb[2]) end
  if is_blank(sid) then
    -- The kept incarnation's own.
  elseif home ~= node then
    call('ZREM', P .. 'places:' .. node, sid)
  elseif inc ~= kept then
    make_lost(sid, sb[2], ms, A[3])
    lost[#lost + 1] = sid
    if sb[1] == 'creating' then
      fail_waiters(sb[3], ms, failure('not_started', 'the sandbox was not created: ' .. A[3],
        '"sandbox_id":"' .. sid .. '"' .. text('reason', A[3])))
    elseif sb[1] == 'stopping' then
      request_again(sb[3], ms)
    end
  end
end
if kept ~= '' and not more then call('HDEL', key, 'returning') end
-- All of it is answered, so what still lies in the dead node's queue is waste that nobody would ever take.
if kept == '' and not more then call('DEL', 'sandfleet.node.' .. node) end
return { closed, doubtful, more and 1 or 0, lost }
